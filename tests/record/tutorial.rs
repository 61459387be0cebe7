//! The tutorial and its program are the same.

const PAGE: &str = include_str!("../../docs/tutorial.md");
const PROGRAM: &str = include_str!("../../examples/tutorial.rs");

/// The lines of a text, without their indentation.
fn lines(text: &str) -> Vec<&str> {
    let lines = text.lines().map(str::trim);
    lines.filter(|line| !line.is_empty()).collect()
}

#[test]
fn each_line_of_the_program_is_in_the_tutorial_and_the_reverse() {
    let program = lines(PROGRAM);
    let mut shown = vec![false; program.len()];
    let parts = PAGE.split("```rust,ignore\n").skip(1);
    for part in parts.filter_map(|part| part.split_once("```")) {
        let part = lines(part.0);
        let at = program.windows(part.len()).position(|lines| lines == part);
        let at = at.unwrap_or_else(|| panic!("not in the program: {part:#?}"));
        shown[at..at + part.len()].fill(true);
    }
    let missing = program.iter().zip(&shown).filter(|(_, shown)| !**shown);
    let missing: Vec<_> = missing.map(|(line, _)| *line).collect();
    // The comment at the top, and the frame of `main`.
    let (top, rest): (Vec<&str>, Vec<&str>) =
        missing.iter().partition(|line| line.starts_with("//!"));
    assert!(!top.is_empty());
    let frame = [
        "fn main() -> Result<(), Box<dyn Error>> {",
        "match right {",
        "LEN => Ok(()),",
        "_ => Err(format!(\"{} elements are wrong\", LEN - right).into()),",
        "}",
        "}",
    ];
    assert_eq!(rest, frame);
}
