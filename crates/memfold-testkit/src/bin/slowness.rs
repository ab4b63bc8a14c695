//! Prints the factor by which deadlines are lengthened on this machine now. `scripts/test` runs it
//! once for all tests.

fn main() {
    println!("{:.1}", memfold_testkit::slowness());
}
