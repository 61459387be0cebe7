//! The driver: generated bindings, the lazily loaded function table, and thin checked calls.

/// The generated bindings: names, types and layouts exactly as in `wrapper.h`.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]
pub mod sys {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
