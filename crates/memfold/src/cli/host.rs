//! `memfold host`: makes and revokes the tokens with which other hosts may use this daemon's lease
//! registry.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use memfold_api::{HostRequest, HostToken};

use super::context::Context;
use super::vm_info::segment as in_path;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Let a host use this daemon's registry over TCP: print a token for it once; the host's
    /// previous token becomes invalid
    Add(Name),
    /// List hosts that have a token
    List,
    /// Revoke a host's token
    Remove(Name),
}

#[derive(Args, Debug)]
pub(super) struct Name {
    /// Name under which the host lends and borrows ('memfold serve --host' there)
    host: String,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    match arguments {
        Arguments::Add(Name { host }) => {
            let request = HostRequest { host: host.clone() };
            let made: HostToken = client.post("/v1/hosts", &request)?;
            // Only the token is printed to standard output, so that it can be redirected to a file.
            context.print(&made, |made| made.token.clone())?;
            if !context.json {
                let url = made.urls.first().map_or("", String::as_str);
                memfold_host::say!(
                    "save this token on '{host}' in a file that only root may read, and start that host's daemon with: --host {host} --registry {url} --registry-token FILE --registry-ca FILE"
                );
            }
        }
        Arguments::List => {
            let hosts: Vec<String> = client.get("/v1/hosts")?;
            context.print(&hosts, |hosts| {
                if hosts.is_empty() {
                    "no host has a token; 'memfold host add NAME' creates one".into()
                } else {
                    hosts.join("\n")
                }
            })?;
        }
        Arguments::Remove(Name { host }) => {
            let was: bool = client.delete(&format!("/v1/hosts/{}", in_path(host)?))?;
            context.print(&was, |was| {
                if *was {
                    format!("token of '{host}' revoked")
                } else {
                    format!("'{host}' had no token")
                }
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
