//! memfold's library in QEMU. It is preloaded (`LD_PRELOAD`), carries out the daemon's orders on
//! the VM's RAM, and does nothing unless `MEMFOLD_QEMU_SOCKET` is set. This crate contains the way
//! into QEMU; `memfold-folder` contains the folding.

pub mod preload;
