//! The `cualloc` command.
fn main() {}
