//! memfold in QEMU.
