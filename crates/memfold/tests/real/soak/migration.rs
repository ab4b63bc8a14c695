//! Test of libvirt's live migration: a domain whose memory is folded moves to another host, and the
//! daemon there adopts it.

use memfold_lab::{DiskMode, Lab};
use memfold_libvirt::Mark;

use crate::beside::libvirt::{
    Cli, DOMAIN, HELD, HOLD, SUM, VM, boot_id, place, run_options, wait_folded, wait_gone,
};
use crate::beside::libvirt_host::{self as libvirt, Host};
use crate::served::{Served, exec, wait_agent};
use crate::support::{self, MEMORY};

#[test]
fn a_folded_libvirt_domain_migrates_and_is_adopted_by_the_other_host() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    if !libvirt::is_there() {
        return;
    }
    let place = place();
    let place = place.path();
    let (from, to) = (Host::start(place, "from", 1), Host::start(place, "to", 2));
    let disk = libvirt::disk(place, "web1", "trixie-a");
    let xml = place.join("web1.xml");
    std::fs::write(&xml, libvirt::domain_xml(place, DOMAIN, &disk, "trixie-a")).unwrap();
    from.ask(&["define", xml.to_str().unwrap()]);
    let (state, other) = (place.join("state"), place.join("other"));
    let options = run_options(&state);
    run_options(&other);
    let more: Vec<&str> = options.iter().map(String::as_str).collect();
    let mut daemon = Served::new(&state, &["mate"])
        .with(&more)
        .inside(from.pid());
    let mut second = Served::new(&other, &[]).with(&more).inside(to.pid());
    daemon.start();
    second.start();
    let (client, there) = (daemon.answers(), second.answers());
    let cli = Cli {
        host: &from,
        place,
        state: &state,
    };
    cli.said(&["libvirt", "enable", DOMAIN, "--domain", "lab"]);
    from.ask(&["start", DOMAIN]);
    let mut mate = Lab::spec("mate", "trixie-b", MEMORY, DiskMode::Buffered).unwrap();
    mate.domain = Some("lab".into());
    daemon.run_warm(&mate);
    wait_agent(&client, VM);
    wait_agent(&client, "mate");
    for name in [VM, "mate"] {
        exec(&client, name, SUM);
    }
    let (sum, held) = (
        exec(&client, VM, SUM).stdout,
        exec(&client, VM, HOLD).stdout,
    );
    let boot = boot_id(&client, VM);
    wait_folded(&client, VM);
    from.ask(&[
        "migrate",
        "--live",
        "--persistent",
        "--undefinesource",
        // Both hosts are the same machine, and have the same file.
        "--unsafe",
        "--domain",
        DOMAIN,
        "--desturi",
        &to.uri(),
        "--migrateuri",
        "tcp://127.0.0.1",
        "--listen-address",
        "127.0.0.1",
    ]);
    wait_gone(&client, VM);
    let info = wait_agent(&there, VM);
    assert_eq!(info.domain.as_deref(), Some("lab"));
    assert_eq!(info.fold_problems, Vec::<String>::new());
    assert_eq!(boot_id(&there, VM), boot);
    assert_eq!(exec(&there, VM, HELD).stdout, held);
    assert_eq!(exec(&there, VM, SUM).stdout, sum);
    let mark = Mark::read(&to.xml(DOMAIN)).unwrap().unwrap();
    assert_eq!(mark.domain.as_deref(), Some("lab"));
    // The other VM had these pages in common with the domain.
    exec(&client, "mate", SUM);
}
