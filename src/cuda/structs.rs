//! The structs that kernels take. Rust and the CUDA sources both declare them, field by field; in the tests NVRTC
//! compares the offset of each field.

use std::fmt::Write;

/// The layout of a struct in Rust, with the names that it has in the CUDA sources.
#[derive(Debug)]
pub struct StructLayout {
    pub name: &'static str,
    pub size: usize,
    /// The fields' names and byte offsets.
    pub fields: &'static [(&'static str, usize)],
}

impl StructLayout {
    /// Returns static assertions that NVRTC rejects if it lays the struct out differently. NVRTC has no `offsetof`, so
    /// they use its front end's `__INTADDR__`, on which only tests should rely.
    pub fn assertions(&self) -> String {
        let StructLayout { name, size, fields } = self;
        let mut text = format!("static_assert(sizeof({name}) == {size}, \"{name}: Rust has {size} bytes\");\n");
        for (field, offset) in *fields {
            let _ = writeln!(
                text,
                "static_assert(__INTADDR__(&((({name}*)0)->{field})) == {offset}, \"{name}.{field}: Rust has it at {offset}\");"
            );
        }
        text
    }
}

/// Declares a struct that a kernel takes, or a part of one, and its [`StructLayout`]: `device_struct! { struct Name =
/// "Name" {…} }`, where the second name is the one in the CUDA sources.
#[macro_export]
macro_rules! device_struct {
    ($(#[$meta:meta])* $vis:vis struct $name:ident = $in_cuda:literal { $($field_vis:vis $field:ident: $type:ty),+ $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        $vis struct $name {
            $($field_vis $field: $type),+
        }

        impl $name {
            pub const LAYOUT: $crate::cuda::StructLayout = $crate::cuda::StructLayout {
                name: $in_cuda,
                size: std::mem::size_of::<$name>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($name, $field))),+],
            };
        }
    };
}
