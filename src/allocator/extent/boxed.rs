//! Large arrays on the host heap.

/// Builds a boxed array element by element, without first building the whole array on the stack.
pub(crate) fn boxed_array<T, const N: usize>(make: impl FnMut() -> T) -> Box<[T; N]> {
    let values: Box<[T]> = std::iter::repeat_with(make).take(N).collect();
    match values.try_into() {
        Ok(array) => array,
        Err(_) => unreachable!("as many were made"),
    }
}
