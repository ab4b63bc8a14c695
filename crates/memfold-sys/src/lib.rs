//! Kernel interfaces that no well-maintained safe library offers. Apart from the entry points of
//! memfold-qemu, only this crate has `unsafe` code.
//!
//! | module | kernel interface |
//! |---|---|
//! | [`cpu`] | CPU time of threads, `clock_gettime(2)` |
//! | [`memory`] | reading and writing another process's memory, `process_vm_readv(2)` |
//! | [`page_cache`] | number of a file's cached pages, `cachestat(2)` |
//! | [`pagemap`] | the memory behind each page of a process, `PAGEMAP_SCAN` on `/proc/PID/pagemap` |
//! | [`environment`] | this process's environment variables, `environ(7)` |
//! | [`extents`] | positions of a file's bytes on a device, `FS_IOC_FIEMAP` |
//! | [`fork`] | a fork that ends at once, to measure its cost, `fork(2)` |
//! | [`session`] | child processes that outlive their parent, `setsid(2)`, or end with it, `prctl(2)` |
//! | [`guest`] | interfaces for the guest agent: file handles, residency of files, signals |
//! | [`descriptor`] | file descriptors over a Unix socket, `SCM_RIGHTS` |
//! | [`peer`] | groups of a socket's peer, `SO_PEERGROUPS`; numbers and names of users and groups |
//! | [`read_only`] | memory that threads may not write for a moment, `mprotect(2)` |
//! | [`region`] | ranges of this process's address space whose mappings are exchanged |
//! | [`userfaultfd`] | catching faults, moving pages, `userfaultfd(2)` |
//! | [`lease`] | whether anybody has a file open for writing, `F_SETLEASE` |
//! | [`locked`] | memfds whose pages stay in RAM, `mlock(2)` |
//! | [`shared`] | words of a file that several processes change at the same time |
//! | [`signals`] | signal masks of threads |
//! | [`tap`] | tap devices, `TUNSETIFF` on `/dev/net/tun` |
//! | [`writeback`] | start of writing a file to its disk, `sync_file_range(2)` |

pub mod cpu;
pub mod descriptor;
pub mod environment;
pub mod extents;
pub mod fork;
pub mod guest;
pub mod lease;
pub mod locked;
pub mod memory;
pub mod page_cache;
pub mod pagemap;
pub mod peer;
pub mod read_only;
pub mod region;
mod result;
pub mod session;
pub mod shared;
pub mod signals;
pub mod tap;
pub mod userfaultfd;
pub mod writeback;
