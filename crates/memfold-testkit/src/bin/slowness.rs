//! Measures how slow this machine is now, and prints the factor by which tests lengthen their
//! deadlines. `scripts/test` runs this program once for all tests.

fn main() {
    println!("{:.1}", memfold_testkit::slowness());
}
