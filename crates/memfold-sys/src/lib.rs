//! What memfold needs of the kernel and no well-kept safe library offers. The only crate with `unsafe` code.
//!
//! | module | kernel interface |
//! |---|---|
//! | [`memory`] | another process's memory, `process_vm_readv(2)` |
//! | [`pagemap`] | what backs each page, `PAGEMAP_SCAN` on `/proc/PID/pagemap` |
//! | [`descriptor`] | file descriptors over a Unix socket, `SCM_RIGHTS` |

pub mod descriptor;
pub mod memory;
pub mod pagemap;
