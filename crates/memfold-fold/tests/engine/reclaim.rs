//! Tests of which VMs keep the fold engine from freeing unneeded pages of a page store.

use std::sync::atomic::Ordering;

use memfold_fold::Command;
use memfold_wire::agent::FromAgent;
use memfold_wire::library::Advice;

use super::debt::owed;
use super::harness::{Ram, Running, domain, folded, pattern, vm};

/// Starts an engine with two VMs that share 256 pages.
fn two_folded(domain: &str, a: &mut Ram, b: &mut Ram) -> Running {
    a.fill(0, 256, 51);
    b.fill(0, 256, 51);
    let engine = Running::start();
    engine.add(1, domain, a, true);
    engine.add(2, domain, b, true);
    engine.cached(1, 1, "/f", 0, 256);
    engine.cached(2, 1, "/f", 0, 256);
    engine.wait("both folded", |s| folded(s, &[1, 2], 256));
    engine
}

/// Returns whether the VM has its own first half, and the shared second half.
fn is_intact(ram: &mut Ram, seed: u64) -> bool {
    ram.holds(0, 128, seed) && (128..256).all(|at| ram.page(at) == pattern(51, at))
}

#[test]
fn store_pages_are_freed_although_one_vm_of_the_domain_may_not_be_folded() {
    let (mut a, mut b) = (Ram::new(), Ram::new());
    let engine = two_folded(&domain("fold-off"), &mut a, &mut b);
    let problem = Some("folding is off".to_owned());
    engine.commands.send(Command::Problem(1, problem)).unwrap();
    a.fill(0, 128, 52);
    b.fill(0, 128, 53);
    let stats = engine.wait("half of the store freed", |s| {
        engine.say(2, FromAgent::Gone(vec![]));
        s.domains[0].punched_pages == 128
    });
    assert_eq!(stats.domains[0].not_freed, None);
    assert_eq!(vm(&stats, 1).copied_pages, 128);
    assert!(is_intact(&mut a, 52) && is_intact(&mut b, 53));
}

#[test]
fn while_a_library_does_not_answer_no_store_page_is_freed_and_the_report_names_its_vm() {
    let (mut a, mut b) = (Ram::new(), Ram::new());
    let engine = two_folded(&domain("unanswered"), &mut a, &mut b);
    a.lost.store(true, Ordering::SeqCst);
    a.fill(0, 128, 54);
    b.fill(0, 128, 55);
    engine.wait("lost", |s| vm(s, 1).problem.is_some());
    assert_eq!(owed(&engine, true, true).given_back_pages, 0);
    let stats = engine.stats();
    let reason = stats.domains[0].not_freed.as_deref().unwrap();
    assert_eq!(
        reason,
        "memfold's library in the QEMU of VM 'vm1' does not answer"
    );
    a.lost.store(false, Ordering::SeqCst);
    let reached = Command::Reached {
        id: 1,
        guest: Box::new(a.guest(true)),
        problem: Some("folding is off".to_owned()),
    };
    engine.commands.send(reached).unwrap();
    assert_eq!(owed(&engine, true, true).given_back_pages, 128);
    assert_eq!(engine.stats().domains[0].not_freed, None);
    assert!(is_intact(&mut a, 54) && is_intact(&mut b, 55));
}

#[test]
fn after_a_restart_the_folded_pages_of_a_vm_that_may_not_be_folded_count_as_debt() {
    let domain = domain("restarted");
    let (mut a, mut b) = (Ram::new(), Ram::new());
    drop(two_folded(&domain, &mut a, &mut b));
    let engine = Running::start();
    for (id, ram) in [(1, &a), (2, &b)] {
        let add = Command::Add {
            id,
            name: format!("vm{id}"),
            domain: Some(domain.clone()),
            advice: vec![Advice::default()],
            layout: ram.layout(),
            guest: Box::new(ram.guest(true)),
            problem: Some("folding is off".to_owned()),
        };
        engine.commands.send(add).unwrap();
    }
    let debt = owed(&engine, false, false);
    let pages: Vec<u64> = debt.vms.iter().map(|vm| vm.folded_pages).collect();
    assert_eq!(pages, [256, 256]);
    a.fill(0, 128, 56);
    b.fill(0, 128, 57);
    assert_eq!(owed(&engine, true, true).given_back_pages, 128);
    assert!(is_intact(&mut a, 56) && is_intact(&mut b, 57));
}
