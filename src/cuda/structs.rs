//! The structs that kernels take. Rust and the CUDA sources both declare them, field by field. In the tests NVRTC
//! checks that the offset of each field is the same.

use std::fmt::Write;

/// The layout of a struct in Rust, with its names in the CUDA sources.
#[derive(Debug)]
pub struct StructLayout {
    pub name: &'static str,
    pub size: usize,
    /// The fields' names and byte offsets.
    pub fields: &'static [(&'static str, usize)],
}

impl StructLayout {
    /// Returns static assertions that fail to compile if NVRTC lays the struct out differently. NVRTC has no
    /// `offsetof`, so they use `__INTADDR__` of its front end. This is undocumented, so only tests should rely on it.
    pub fn assertions(&self) -> String {
        let StructLayout { name, size, fields } = self;
        // A field's address in a struct at address 0 is its offset.
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

/// Declares a struct that a kernel takes, or that is part of one, and its [`StructLayout`]: `device_struct! { struct
/// Name = "Name" {…} }`. The second name is the struct's name in the CUDA sources.
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
