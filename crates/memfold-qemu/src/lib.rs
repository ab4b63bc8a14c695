//! memfold's library in QEMU, which QEMU preloads (`LD_PRELOAD`). The library executes the daemon's
//! orders on the VM's RAM. If the environment variable `MEMFOLD_QEMU_SOCKET` is not set, the
//! library does nothing. This crate contains the entry points into the library; `memfold-folder`
//! contains the rest.

pub mod preload;
