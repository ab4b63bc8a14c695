//! What this host can do: probed once, asked by everything.
