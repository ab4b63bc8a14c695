//! What memfold needs of the kernel and no well-kept safe library offers. The only crate with `unsafe` code.
//!
//! | module | kernel interface |
//! |---|---|
//! | [`mapping`] | shared mappings of a page-store file |
//! | [`memory`] | another process's memory, `process_vm_readv(2)` |
//! | [`pagemap`] | what backs each page, `PAGEMAP_SCAN` on `/proc/PID/pagemap` |
//! | [`guest`] | what the guest agent needs: file handles, residency of files, signals |
//! | [`descriptor`] | file descriptors over a Unix socket, `SCM_RIGHTS` |

pub mod descriptor;
pub mod guest;
pub mod mapping;
pub mod memory;
pub mod pagemap;
