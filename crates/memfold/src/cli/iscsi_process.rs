//! `memfold iscsi-process`: helper processes of `lend::iscsi`, started by daemons.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use memfold_lend::iscsi::{bridge, target};

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Helper of a lease's tgtd
    Target {
        /// Bytes to lend
        #[arg(long)]
        bytes: u64,
        /// Where tgtd listens
        #[arg(long)]
        portal: SocketAddr,
        /// File of the key
        #[arg(long)]
        key: PathBuf,
        /// What tgtd's socket is named by
        #[arg(long)]
        socket: PathBuf,
        /// File to write when it is ready
        #[arg(long)]
        ready: PathBuf,
    },
    /// Helper of a borrower's qemu-nbd
    Bridge {
        /// Where the lender is
        #[arg(long)]
        portal: SocketAddr,
        /// File of the key
        #[arg(long)]
        key: PathBuf,
        /// Where to serve it
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
