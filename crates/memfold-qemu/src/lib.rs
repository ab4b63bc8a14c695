//! memfold's library in QEMU. QEMU preloads the library (`LD_PRELOAD`). The library executes the
//! daemon's orders on the VM's RAM; without the variable `MEMFOLD_QEMU_SOCKET` it does nothing.
//! This crate contains the entry points into QEMU; `memfold-folder` contains the rest.

pub mod preload;
