//! Large arrays on the heap.

/// So many values, made one after the other and not by way of the stack, which such an array would fill.
pub(crate) fn boxed_array<T, const N: usize>(make: impl FnMut() -> T) -> Box<[T; N]> {
    let values: Box<[T]> = std::iter::repeat_with(make).take(N).collect();
    match values.try_into() {
        Ok(array) => array,
        Err(_) => unreachable!("as many were made"),
    }
}
