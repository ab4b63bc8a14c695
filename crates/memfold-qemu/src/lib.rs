//! memfold in QEMU: preloaded (`LD_PRELOAD`), it carries out the daemon's orders on the VM's RAM,
//! and does nothing unless `MEMFOLD_QEMU_SOCKET` is set. What folds is in `memfold-folder`; here is
//! how it gets into QEMU.

pub mod preload;
