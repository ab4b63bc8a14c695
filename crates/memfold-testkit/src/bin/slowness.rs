//! Prints the factor by which deadlines are longer on this machine now; `scripts/test` asks once
//! for all tests.

fn main() {
    println!("{:.1}", memfold_testkit::slowness());
}
