//! The form in which kernels receive a tensor: a matrix in memory, with a dtype that is known at run time.

use crate::error::{Error, Result};
use crate::host::has_memory;
use tch::{Device, Kind, Tensor};

/// A matrix of `rows` rows, each of `cols` numbers. Rows start `stride` numbers apart. `data` is null if the tensor is
/// absent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct View {
    pub data: *mut u8,
    pub rows: i64,
    pub cols: i64,
    pub stride: i64,
    /// The code of the dtype, as in [`by_dtype!`](crate::kernel::view::by_dtype); 4 is int64, and 5 is a byte.
    pub dtype: i32,
}

impl View {
    /// The view of a tensor that is not there.
    pub const ABSENT: View = View { data: std::ptr::null_mut(), rows: 0, cols: 0, stride: 0, dtype: -1 };

    /// Returns the view of a matrix on the CPU with contiguous rows; `None` for other tensors or unsupported types.
    pub fn of(t: &Tensor) -> Option<View> {
        // These codes select the element type in the macro `by_dtype!`; 4, for int64, has no kernels.
        let dtype = match t.kind() {
            Kind::Float => 0,
            Kind::Double => 1,
            Kind::BFloat16 => 2,
            Kind::Half => 3,
            Kind::Int64 => 4,
            _ => return None,
        };
        let (&[rows, cols], &[stride, step]) = (&t.size()[..], &t.stride()[..]) else { return None };
        // The stride of a dimension of one element or none does not matter.
        let has_contiguous_rows = (step == 1 || cols <= 1) && (stride >= cols || rows <= 1);
        let is_readable = t.device() == Device::Cpu && has_contiguous_rows && has_memory(t);
        is_readable.then(|| View { data: t.data_ptr().cast(), rows, cols, stride, dtype })
    }

    /// Returns the view of a contiguous tensor on the CPU as a matrix (rows, cols). Errors unless the tensor is of the
    /// given type and has rows·cols numbers.
    pub fn of_rows(t: &Tensor, kind: Kind, [rows, cols]: [i64; 2]) -> Result<View> {
        let fits = t.kind() == kind && t.numel() as i64 == rows * cols && t.is_contiguous();
        let view = if fits { View::of(&t.f_view([rows, cols])?) } else { None };
        view.ok_or_else(|| {
            let (found, size, device) = (t.kind(), t.size(), t.device());
            Error::Torch(format!(
                "a kernel expected a contiguous {kind:?} tensor of {rows} rows of {cols} on the CPU, got {found:?} {size:?} on \
                 {device:?}"
            ))
        })
    }

    /// True if there is no tensor.
    pub fn is_absent(&self) -> bool {
        self.data.is_null()
    }

    /// Returns the number of rows as a usize.
    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    /// Returns the number of columns as a usize.
    pub fn cols(&self) -> usize {
        self.cols as usize
    }

    /// Returns the number of elements from the first to the last, including the gaps between rows.
    fn len(&self) -> usize {
        match (self.rows, self.cols) {
            (0, _) | (_, 0) => 0,
            (rows, cols) => ((rows - 1) * self.stride + cols) as usize,
        }
    }

    /// Returns the bytes from the matrix's first number to its last; an empty slice if the tensor is absent.
    pub fn bytes(&self) -> *const [u8] {
        // The index is the dtype's code. The code −1 of an absent tensor is no index, so its size is 0.
        let bytes_per_number = [4, 8, 2, 2, 8, 1].get(self.dtype as usize).copied().unwrap_or(0);
        std::ptr::slice_from_raw_parts(self.data, self.len() * bytes_per_number)
    }

    /// Returns the numbers from the first to the last, including the gaps between rows; empty if the tensor is absent.
    ///
    /// # Safety
    /// The view's dtype is T, the caller of the kernel keeps the tensor alive for `'a`, and nobody writes it meanwhile.
    pub unsafe fn slice<'a, T>(&self) -> &'a [T] {
        if self.is_absent() || self.len() == 0 {
            return &[];
        }
        std::slice::from_raw_parts(self.data.cast(), self.len())
    }

    /// Returns a writable [`slice`](Self::slice).
    ///
    /// # Safety
    /// The conditions of [`slice`](Self::slice) hold, and this is the tensor's only slice.
    pub unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        if self.is_absent() || self.len() == 0 {
            return &mut [];
        }
        std::slice::from_raw_parts_mut(self.data.cast(), self.len())
    }
}

/// Returns the type in which sums over numbers of this type accumulate: f64 for f64, otherwise f32. It is the
/// [`Acc`](crate::cpu::Element::Acc) of [`by_dtype!`](crate::kernel::view::by_dtype)'s element type.
pub fn accumulation(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Runs `$body` with `$E` as the element type of a view's dtype; returns an error for a dtype without kernels.
macro_rules! by_dtype {
    ($view:expr, $E:ident => $body:expr) => {
        match $view.dtype {
            0 => {
                type $E = f32;
                $body
            }
            1 => {
                type $E = f64;
                $body
            }
            2 => {
                type $E = half::bf16;
                $body
            }
            3 => {
                type $E = half::f16;
                $body
            }
            other => Err($crate::error::Error::Torch(format!("dtype code {other} has no kernel"))),
        }
    };
}
pub(crate) use by_dtype;
