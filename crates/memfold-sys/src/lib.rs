//! What memfold needs of the kernel and no well-kept safe library offers. The only crate with
//! `unsafe` code.
//!
//! | module | kernel interface |
//! |---|---|
//! | [`cpu`] | CPU time of threads, `clock_gettime(2)` |
//! | [`memory`] | another process's memory, `process_vm_readv(2)` |
//! | [`pagemap`] | what backs each page, `PAGEMAP_SCAN` on `/proc/PID/pagemap` |
//! | [`extents`] | where on a device a file lies, `FS_IOC_FIEMAP` |
//! | [`session`] | children that outlive us, `setsid(2)` |
//! | [`guest`] | what the guest agent needs: file handles, residency of files, signals |
//! | [`descriptor`] | file descriptors over a Unix socket, `SCM_RIGHTS` |
//! | [`peer`] | who is at the other end of a socket, `SO_PEERGROUPS` |
//! | [`region`] | ranges of our own address space whose mappings are exchanged |
//! | [`userfaultfd`] | catching faults, moving pages, `userfaultfd(2)` |
//! | [`locked`] | files without a name whose pages stay in RAM |
//! | [`shared`] | words of a file that several processes change |
//! | [`signals`] | signal masks of threads |
//! | [`writeback`] | a file's way to its disk, `sync_file_range(2)` |

pub mod cpu;
pub mod descriptor;
pub mod extents;
pub mod guest;
pub mod locked;
pub mod memory;
pub mod pagemap;
pub mod peer;
pub mod region;
pub mod session;
pub mod shared;
pub mod signals;
pub mod userfaultfd;
pub mod writeback;
