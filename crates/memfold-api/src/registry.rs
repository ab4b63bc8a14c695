//! Connects the daemon to a lease registry that another program serves: another daemon (Unix socket
//! or TLS), or etcd. The registry records which host lends RAM to which VM.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use memfold_host::chain;
use memfold_lend::calls::{Answer, Call, CallRegistry};
use memfold_lend::https::{Https, Post};
use memfold_lend::place::read_token;
use memfold_lend::{EtcdRegistry, Registry, RegistryAt};

use crate::client::{Client, ErrorBody};

/// URL path of the registry of leases, in the API of a daemon that serves a registry.
pub const REGISTRY_PATH: &str = "/v1/registry";

/// Time limit of a request to another daemon's registry.
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns a client of the registry of leases at address `at`.
pub fn registry_at(at: &RegistryAt) -> Arc<dyn Registry> {
    let place = at.to_string();
    match at {
        RegistryAt::Socket(socket) => {
            let socket = socket.clone();
            let transport = move |call: &Call| {
                let client = Client::new(&socket).map_err(|error| error.to_string())?;
                let answer = client.within(REGISTRY_TIMEOUT).post(REGISTRY_PATH, call);
                answer.map_err(|error| chain(&error))
            };
            Arc::new(CallRegistry::new(place, transport))
        }
        RegistryAt::Daemon { member, tls, token } => {
            let http = Https::new(vec![member.clone()], Some(tls.clone()));
            let token = token.clone();
            let transport = move |call: &Call| ask_daemon(&http, &token, call);
            Arc::new(CallRegistry::new(place, transport))
        }
        RegistryAt::Etcd { members, tls } => {
            Arc::new(EtcdRegistry::new(place, members.clone(), tls.clone()))
        }
    }
}

fn ask_daemon(http: &Https, token: &Path, call: &Call) -> Result<Answer, String> {
    let token = read_token(token).map_err(|error| error.to_string())?;
    let body = serde_json::to_vec(call).map_err(|error| error.to_string())?;
    let post = Post {
        path: REGISTRY_PATH,
        token: Some(&token),
        body: &body,
        patience: REGISTRY_TIMEOUT,
    };
    let (status, body) = http.post(&post).map_err(|error| error.to_string())?;
    if status == StatusCode::OK {
        return serde_json::from_slice(&body).map_err(|error| {
            format!("cannot parse its answer ({error}); use daemons of the same version")
        });
    }
    Err(match serde_json::from_slice(&body) {
        Err(_) => format!("it answered {status}"),
        Ok(ErrorBody { error, hint, .. }) => match hint {
            Some(hint) => format!("{error} ({hint})"),
            None => error,
        },
    })
}
