//! Element types that are known only at run time.

use std::fmt;

macro_rules! types {
    ($($(#[$doc:meta])* $name:ident $text:literal $bytes:literal $stored:ident;)*) => {
        /// The type of a tensor's elements.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $name,)*
        }

        impl DType {
            /// All element types.
            pub const ALL: &'static [DType] = &[$(DType::$name),*];

            /// Returns the size of an element in bytes, which is also its alignment.
            pub const fn bytes(self) -> usize {
                match self {
                    $(DType::$name => $bytes,)*
                }
            }

            /// Returns the type's name in Rust notation.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DType::$name => $text,)*
                }
            }

            /// Returns the type with which Rust reads and writes the elements: for types that Rust does not have, and
            /// for truth values, unsigned integers of the same size.
            pub(crate) const fn stored(self) -> DType {
                match self {
                    $(DType::$name => DType::$stored,)*
                }
            }
        }
    };
}

types! {
    /// True or false, in one byte: 0 is false.
    Bool "bool" 1 U8;
    /// Signed, 8 bits.
    I8 "i8" 1 I8;
    /// Signed, 16 bits.
    I16 "i16" 2 I16;
    /// Signed, 32 bits.
    I32 "i32" 4 I32;
    /// Signed, 64 bits.
    I64 "i64" 8 I64;
    /// Unsigned, 8 bits.
    U8 "u8" 1 U8;
    /// Unsigned, 16 bits.
    U16 "u16" 2 U16;
    /// Unsigned, 32 bits.
    U32 "u32" 4 U32;
    /// Unsigned, 64 bits.
    U64 "u64" 8 U64;
    /// Floating point, 16 bits.
    F16 "f16" 2 U16;
    /// Floating point, the upper 16 bits of an `f32`.
    BF16 "bf16" 2 U16;
    /// Floating point, 32 bits.
    F32 "f32" 4 F32;
    /// Floating point, 64 bits.
    F64 "f64" 8 F64;
    /// Floating point, 8 bits: 4 of exponent, 3 of mantissa, no infinities (`e4m3fn`).
    F8E4M3 "f8e4m3" 1 U8;
    /// Floating point, 8 bits: 5 of exponent, 2 of mantissa.
    F8E5M2 "f8e5m2" 1 U8;
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
