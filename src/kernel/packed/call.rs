//! Packs a matrix on the CPU, and multiplies rows by it; threads share the rows.

use super::{product, PackedMatrix};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Accumulator;
use crate::error::{Error, Result};
use crate::host::has_memory;
use crate::kernel::view::View;
use tch::{Device, Kind, Tensor};

/// The least number of rows that are worth a thread of their own.
const GRAIN: usize = 96;

/// Returns W (n, k) and b (n) as a packed matrix; both must be contiguous, on the CPU and of type A.
pub fn pack<A: Accumulator>(weight: &Tensor, bias: Option<&Tensor>) -> Result<PackedMatrix<A>> {
    let (n, k) = weight.size2()?;
    let is_packable =
        |t: &Tensor| t.kind() == kind::<A>() && t.is_contiguous() && t.device() == Device::Cpu && has_memory(t);
    if !is_packable(weight) || bias.is_some_and(|bias| !is_packable(bias) || bias.numel() != n as usize) {
        return Err(Error::Torch(format!(
            "a matrix ({n}, {k}) and its bias are packed from contiguous {:?}",
            kind::<A>()
        )));
    }
    // SAFETY: both tensors are contiguous and of type A, as has been checked, and outlive this function.
    let numbers = |t: &Tensor| unsafe { std::slice::from_raw_parts(t.data_ptr().cast(), t.numel()) };
    Ok(PackedMatrix::new(numbers(weight), bias.map(numbers), n as usize, k as usize))
}

/// Returns y = xWᵀ + b (…, n) for x (…, k) of type A on the CPU. No gradient is recorded.
pub fn linear<A: Accumulator>(x: &Tensor, w: &PackedMatrix<A>) -> Result<Tensor> {
    let mut size = x.size();
    let k = size.pop().unwrap_or(0);
    if k as usize != w.inner() || x.kind() != kind::<A>() {
        let (n, wanted, got) = (w.columns(), w.inner(), x.kind());
        return Err(Error::Torch(format!("x has {k} columns of {got:?}, the packed matrix is ({n}, {wanted})")));
    }
    let x = x.f_reshape([-1, k].as_slice())?;
    // The product takes contiguous rows that need not follow each other, so only other tensors are copied.
    let x = if View::of(&x).is_some() { x } else { x.f_contiguous()? };
    let n = w.columns();
    let y = Tensor::f_empty([x.size()[0], n as i64].as_slice(), (x.kind(), x.device()))?;
    let (Some(from), Some(to)) = (View::of(&x), View::of(&y)) else {
        return Err(Error::Torch("packed matrices multiply tensors on the CPU".to_string()));
    };
    // SAFETY: both tensors outlive this function and are of type A; y is new, and each range writes its own rows.
    unsafe {
        let (x, y, stride) = (from.slice::<A>(), Shared::new(to.slice_mut::<A>()), from.stride as usize);
        parallel::for_each(from.rows(), GRAIN, |rows| {
            let y = y.slice(rows.start * n..rows.end * n);
            product(&x[rows.start * stride..], stride, rows.len(), w, y, n);
        });
    }
    size.push(n as i64);
    Ok(y.f_reshape(size.as_slice())?)
}

/// Returns A's type as a tensor's `Kind`.
pub fn kind<A: Accumulator>() -> Kind {
    match size_of::<A>() {
        4 => Kind::Float,
        _ => Kind::Double,
    }
}
