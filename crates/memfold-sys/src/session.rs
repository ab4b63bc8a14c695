//! Child processes that outlive us.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the child the leader of its own session (`setsid(2)`): no terminal's hang-up or Ctrl-C reaches it.
pub fn detach(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only setsid(2) is called, which is async-signal-safe and takes no lock.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_detached_child_leads_its_own_session() {
        let mut child = detach(Command::new("sleep").arg("10")).spawn().unwrap();
        let pid = i32::try_from(child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        let session = rustix::process::getsid(pid).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Some(session), pid);
    }
}
