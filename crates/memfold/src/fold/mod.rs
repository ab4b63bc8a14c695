//! Folding: hints to matches to orders, under a budget.
