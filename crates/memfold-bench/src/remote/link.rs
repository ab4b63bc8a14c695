//! The network link of the study `remote`: 10 Gbit/s to a simulated second host, which is a network
//! namespace on this host, connected by a veth pair.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use memfold_lab::undo_at_interrupt;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};

use crate::host::run_program;
use crate::record::spread;

/// Address of this end, from RFC 2544's range for benchmarks, which no host uses otherwise.
const HERE: &str = "198.18.77.1";
pub const THERE: &str = "198.18.77.2";

/// Bandwidth to which `tc` limits each direction.
const BANDWIDTH: &str = "10gbit";

/// Payloads of a round trip: the least possible, and a page.
const PAYLOADS: [usize; 2] = [1, 4096];

const TRIPS: usize = 2000;

/// A simulated network link to a second host. Dropping the value removes both ends.
#[derive(Debug)]
pub struct Link {
    space: String,
}

impl Link {
    /// Creates the network link. This needs root, and the programs `ip` and `tc`.
    pub fn new() -> anyhow::Result<Self> {
        let space = format!("memfold-bench-{}", std::process::id());
        let device = format!("mfb{}", std::process::id());
        ip(&["netns", "add", &space])?;
        // If a later step fails, dropping this removes the namespace, and with it both ends of the
        // pair.
        let link = Self {
            space: space.clone(),
        };
        let made = space.clone();
        undo_at_interrupt(move || {
            let _ = ip(&["netns", "del", &made]);
        });
        let pair = [
            "link", "add", &device, "type", "veth", "peer", "name", "eth0", "netns", &space,
        ];
        ip(&pair)?;
        ip(&["addr", "add", &format!("{HERE}/30"), "dev", &device])?;
        ip(&["link", "set", &device, "up"])?;
        let inside = ["-n", &space];
        let address = format!("{THERE}/30");
        for arguments in [
            &["addr", "add", &address, "dev", "eth0"][..],
            &["link", "set", "eth0", "up"],
            &["link", "set", "lo", "up"],
        ] {
            ip(&[&inside, arguments].concat())?;
        }
        let shape = |device| {
            let add = ["qdisc", "add", "dev", device, "root", "tbf"];
            [
                &add[..],
                &["rate", BANDWIDTH, "burst", "2mb", "latency", "20ms"],
            ]
            .concat()
        };
        run_program("iproute2", "tc", &shape(&device))?;
        run_program("iproute2", "tc", &[&inside, &shape("eth0")[..]].concat())?;
        Ok(link)
    }

    /// Returns a command that runs a program at the other end of the link.
    pub fn there(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new("nsenter");
        let space = format!("--net=/run/netns/{}", self.space);
        command.arg(space).arg(program);
        command
    }

    /// Measures round trips over TCP on the link, in microseconds. No block can be fetched faster
    /// than a round trip.
    pub fn round_trips(&self) -> anyhow::Result<Value> {
        let space = File::open(format!("/run/netns/{}", self.space))?;
        let (tell, told) = std::sync::mpsc::channel();
        let echo = std::thread::spawn(move || -> anyhow::Result<()> {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(space.as_fd(), kind)?;
            let listener = TcpListener::bind((THERE, 0))?;
            tell.send(listener.local_addr()?)?;
            for payload in PAYLOADS {
                let mut stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                let (mut asked, answer) = ([0; 1], vec![0; payload]);
                // The other end closes the connection after its measurement.
                while stream.read_exact(&mut asked).is_ok() {
                    stream.write_all(&answer)?;
                }
            }
            Ok(())
        });
        let address = told.recv();
        let address =
            address.context("the other end of the simulated link did not start to listen");
        let trips = address.and_then(measure);
        let end = echo.join();
        ensure!(end.is_ok(), "the other end of the link has panicked");
        trips
    }
}

fn measure(address: SocketAddr) -> anyhow::Result<Value> {
    let mut results = json!({});
    for payload in PAYLOADS {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let mut answer = vec![0; payload];
        let mut times = Vec::new();
        for _ in 0..TRIPS {
            let began = Instant::now();
            stream.write_all(&[1])?;
            stream.read_exact(&mut answer)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        results[format!("{payload}_bytes_us")] = spread(&times);
    }
    Ok(results)
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "del", &self.space]) {
            eprintln!("memfold: {error:#}");
        }
    }
}

fn ip(arguments: &[&str]) -> anyhow::Result<()> {
    run_program("iproute2", "ip", arguments).map(drop)
}
