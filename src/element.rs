//! What elements in columns, and in errors, may be.

use std::fmt;

/// The type of a column's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 64 bits.
    U64,
    /// Floating point, 32 bits.
    F32,
    /// Floating point, 64 bits.
    F64,
    /// True or false, in one byte: 0 is false.
    Bool,
}

impl ElementType {
    /// All of them.
    pub const ALL: [ElementType; 7] = [
        ElementType::I32,
        ElementType::I64,
        ElementType::U32,
        ElementType::U64,
        ElementType::F32,
        ElementType::F64,
        ElementType::Bool,
    ];

    /// Bytes of an element, which is also its alignment.
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::Bool => 1,
            ElementType::I32 | ElementType::U32 | ElementType::F32 => 4,
            ElementType::I64 | ElementType::U64 | ElementType::F64 => 8,
        }
    }

    /// The type's name in Rust.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::I32 => "i32",
            ElementType::I64 => "i64",
            ElementType::U32 => "u32",
            ElementType::U64 => "u64",
            ElementType::F32 => "f32",
            ElementType::F64 => "f64",
            ElementType::Bool => "bool",
        }
    }

    /// Bytes of so many elements; none if no address space has them.
    pub(crate) fn bytes_of(self, rows: usize) -> Option<usize> {
        rows.checked_mul(self.bytes())
            .filter(|bytes| isize::try_from(*bytes).is_ok())
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that is the element of a column. Sealed.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its type.
    const TYPE: ElementType;
}

mod sealed {
    /// No padding: each of `size_of::<Self>()` bytes is a part of the value.
    pub trait Sealed: Sized {
        /// The value that a device's bytes stand for; there are `size_of::<Self>()` of them.
        fn from_device(bytes: &[u8]) -> Self;
    }

    impl Sealed for bool {
        fn from_device(bytes: &[u8]) -> bool {
            bytes.iter().any(|byte| *byte != 0)
        }
    }

    macro_rules! number {
        ($($number:ty),*) => {$(
            impl Sealed for $number {
                fn from_device(bytes: &[u8]) -> $number {
                    let mut own = [0; size_of::<$number>()];
                    own.copy_from_slice(bytes);
                    <$number>::from_ne_bytes(own)
                }
            }
        )*};
    }
    number!(i32, i64, u32, u64, f32, f64);
}

macro_rules! element {
    ($($rust:ty: $of:ident),*) => {$(
        impl Element for $rust {
            const TYPE: ElementType = ElementType::$of;
        }
        const _: () = assert!(size_of::<$rust>() == ElementType::$of.bytes());
    )*};
}
element!(i32: I32, i64: I64, u32: U32, u64: U64, f32: F32, f64: F64, bool: Bool);
