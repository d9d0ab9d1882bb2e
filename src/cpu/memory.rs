//! Allocations whose size depends on an operator's caller. If memory is short, the kernel unwinds with an [`Error`],
//! which `operator::ffi::status` turns into an exception; `vec!` would abort the process instead.

use crate::cpu::Accumulator;
use crate::error::{Error, Result};
use std::ops::{Deref, DerefMut};
use std::panic::resume_unwind;

/// Returns a vector of `len` copies of `value`.
pub fn filled<T: Clone>(value: T, len: usize) -> Vec<T> {
    let mut values = reserved(len);
    values.resize(len, value);
    values
}

/// Collects the items of an iterator whose `size_hint` gives their number.
pub fn collected<T>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let items = items.into_iter();
    let mut values = reserved(items.size_hint().0);
    values.extend(items);
    values
}

/// Returns an empty vector with room for `len` values.
pub fn reserved<T>(len: usize) -> Vec<T> {
    let mut values = Vec::new();
    if values.try_reserve_exact(len).is_err() {
        refuse(len as u128 * size_of::<T>() as u128);
    }
    values
}

/// Errors if the system cannot provide this many bytes. Callers check this before work that allocates them in many
/// small pieces. `what` returns the subject of the error message, which names the quantity to reduce.
pub fn room(bytes: u128, what: impl FnOnce() -> String) -> Result<()> {
    // The trial vector is freed at once.
    let fits = usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    match fits {
        true => Ok(()),
        false => Err(Error::invalid(format!("not enough memory: {} takes {bytes} bytes", what()))),
    }
}

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// A buffer that begins on a cache line, because a 64-byte access across two lines counts as two accesses.
pub struct Aligned<A> {
    /// `start` unused numbers up to the next cache line, then the buffer's own `len` numbers.
    values: Vec<A>,
    start: usize,
    len: usize,
}

impl<A: Accumulator> Aligned<A> {
    /// Returns `len` zeros.
    pub fn new(len: usize) -> Self {
        Self::filled_up(&[], len, A::ZERO)
    }

    /// Returns a buffer of `len` numbers: `values`, then copies of `value`.
    pub fn filled_up(values: &[A], len: usize, value: A) -> Self {
        // At most one line lies before the start. The vector has room for it from the beginning, because a vector that
        // grew would move and lose its alignment. `align_offset` may be unable to tell, and then returns usize::MAX.
        let most_before = LINE / size_of::<A>();
        let mut all: Vec<A> = reserved(len.saturating_add(most_before));
        let start = all.as_ptr().align_offset(LINE).min(most_before);
        all.resize(start, value);
        all.extend_from_slice(values);
        all.resize(start + len, value);
        Aligned { values: all, start, len }
    }
}

impl<A> Deref for Aligned<A> {
    type Target = [A];
    #[inline(always)]
    fn deref(&self) -> &[A] {
        &self.values[self.start..self.start + self.len]
    }
}

impl<A> DerefMut for Aligned<A> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [A] {
        &mut self.values[self.start..self.start + self.len]
    }
}

/// Unwinds with an error that names the bytes that could not be allocated; the kernel's caller catches it.
#[cold]
fn refuse(bytes: u128) -> ! {
    let text =
        format!("not enough memory: a kernel's work space has {bytes} bytes; call it with fewer rows or columns");
    // `panic!` is not used, because it would also print the message.
    resume_unwind(Box::new(Error::Torch(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_an_error_and_not_the_end() {
        for len in [1 << 60, usize::MAX] {
            let caught = std::panic::catch_unwind(|| filled(0.0f32, len)).unwrap_err();
            let error = caught.downcast::<Error>().unwrap().to_string();
            let expected = format!("not enough memory: a kernel's work space has {} bytes;", 4 * len as u128);
            assert!(error.starts_with(&expected), "{error}");
        }
        assert_eq!(
            collected((0..3).map(|i| 2 * i)),
            filled(1, 3).iter().zip([0, 2, 4]).map(|(a, b)| a * b).collect::<Vec<_>>()
        );
    }

    #[test]
    fn room_is_asked_for_before_work() {
        room(1 << 20, || unreachable!()).unwrap();
        for bytes in [1 << 60, u128::MAX] {
            let said = room(bytes, || "a beam of 9 (take a smaller one)".into()).unwrap_err().to_string();
            assert_eq!(said, format!("not enough memory: a beam of 9 (take a smaller one) takes {bytes} bytes"));
        }
    }

    #[test]
    fn aligned_numbers_begin_on_a_cache_line() {
        for len in [0, 1, 100] {
            let zeros = Aligned::<f32>::new(len);
            assert_eq!((zeros.as_ptr().align_offset(LINE), &zeros[..]), (0, &vec![0.0; len][..]));
        }
        let filled = Aligned::filled_up(&[1.0f64, 2.0], 4, 7.0);
        assert_eq!((filled.as_ptr().align_offset(LINE), &filled[..]), (0, &[1.0, 2.0, 7.0, 7.0][..]));
    }
}
