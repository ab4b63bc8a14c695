//! `memfold iscsi-process`: a helper process that a daemon starts to lend or borrow RAM by iSCSI
//! (`memfold_lend::iscsi`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use memfold_lend::iscsi::{bridge, target};

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Export lent memory with tgtd
    Target {
        /// Bytes to lend
        #[arg(long)]
        bytes: u64,
        /// Address on which tgtd listens
        #[arg(long)]
        portal: SocketAddr,
        /// File with the key of the lease
        #[arg(long)]
        key: PathBuf,
        /// Path that names tgtd's socket
        #[arg(long)]
        socket: PathBuf,
        /// File to write when tgtd is ready
        #[arg(long)]
        ready: PathBuf,
    },
    /// Connect to a lender with qemu-nbd
    Bridge {
        /// Address of the lender
        #[arg(long)]
        portal: SocketAddr,
        /// File with the key of the lease
        #[arg(long)]
        key: PathBuf,
        /// Path of the Unix socket on which the lent memory is served
        #[arg(long)]
        socket: PathBuf,
    },
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match arguments {
        Arguments::Target {
            bytes,
            portal,
            key,
            socket,
            ready,
        } => {
            let files = target::Files {
                key: key.clone(),
                socket: socket.clone(),
                ready: ready.clone(),
            };
            target::serve(*bytes, *portal, &files)?;
        }
        Arguments::Bridge {
            portal,
            key,
            socket,
        } => bridge::serve(*portal, key, socket)?,
    }
    Ok(ExitCode::SUCCESS)
}
