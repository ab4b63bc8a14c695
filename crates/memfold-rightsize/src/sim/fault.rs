//! What can go wrong with a guest.

/// A fault of one guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// The guest reports rightly and in time.
    #[default]
    None,
    /// There is never a report.
    Silent,
    /// The agent ends at this second; nothing reports from then on, and nothing is trimmed.
    AgentKilled(u32),
    /// The guest stands still between these two seconds: no work, no reports, no balloon.
    Frozen(u32, u32),
    /// The guest lies.
    Lies(Lie),
    /// The balloon driver is missing: the device has no effect.
    NoBalloonDriver,
    /// The agent answers, but trims nothing.
    TrimsNothing,
    /// A quarter of the RAM is unplugged at this second, from outside.
    Unplugged(u32),
    /// The guest boots again at this second. The time of its reports goes on, because it is the
    /// host's, and so does the balloon's target.
    Reboots(u32),
}

/// How a guest lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// It claims consistently to need all memory and to wait for more.
    NeedsAll,
    /// It claims that nothing is used.
    NeedsNothing,
    /// Its figures contradict each other.
    Contradicts,
    /// Each figure is random.
    Noise,
}
