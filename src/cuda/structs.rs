//! The structs that kernels take. Rust and the CUDA sources declare them both, field by field. In the tests NVRTC compares
//! the place of each field.

use std::fmt::Write;

/// A struct as Rust lays it out, by the names that it has in the sources.
#[derive(Debug)]
pub struct StructLayout {
    pub name: &'static str,
    pub size: usize,
    /// Names and the bytes before them.
    pub fields: &'static [(&'static str, usize)],
}

impl StructLayout {
    /// Statements that NVRTC refuses where it lays the struct out in another way. It has no `offsetof`, but its front end's
    /// `__INTADDR__`, which nobody but tests should rely on.
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

/// A struct that a kernel takes, or a part of one, and its [`StructLayout`]: `device_struct! { struct Name = "Name" {…} }`,
/// the second name being the sources'.
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
