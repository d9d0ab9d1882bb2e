//! Parallel loops on libtorch's own threads.

use super::memory;
use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::Mutex;

extern "C" {
    /// Calls at::parallel_for; `run` receives `context` and the begin and the end of each range.
    fn nfrs_parallel_for(n: i64, grain: i64, run: extern "C" fn(*const c_void, i64, i64), context: *const c_void);
}

/// Returns the number of threads that [`for_each`] may use: `torch.get_num_threads()`.
pub fn threads() -> usize {
    tch::get_num_threads() as usize
}

/// Calls `work` on disjoint ranges that together cover 0..n, on several threads if n exceeds `grain`, the least number
/// of items that are worth a thread. If a call panics, the panic continues in the caller after all calls have ended.
pub fn for_each<F: Fn(Range<usize>) + Sync>(n: usize, grain: usize, work: F) {
    /// What all threads share: the work, and the panic of the last call that panicked.
    struct Task<F> {
        work: F,
        panic: Mutex<Option<Box<dyn Any + Send>>>,
    }
    /// Does the work on one range for C++, which passes `context`, a pointer to the task.
    extern "C" fn run<F: Fn(Range<usize>) + Sync>(context: *const c_void, begin: i64, end: i64) {
        // SAFETY: `context` is the task below, which outlives nfrs_parallel_for's return.
        let task = unsafe { &*context.cast::<Task<F>>() };
        // A panic must not unwind into C++.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (task.work)(begin as usize..end as usize))) {
            *task.panic.lock().expect("nobody panics who holds it") = Some(panic);
        }
    }
    let task = Task { work, panic: Mutex::new(None) };
    // SAFETY: at::parallel_for returns only after every call of `run` has returned.
    unsafe { nfrs_parallel_for(n as i64, grain.max(1) as i64, run::<F>, (&raw const task).cast()) }
    if let Some(panic) = task.panic.into_inner().expect("nobody panics who holds it") {
        resume_unwind(panic);
    }
}

/// A pointer that threads share. It is safe because each thread writes only its own range.
#[derive(Clone, Copy)]
pub struct Shared<T>(*mut T);
// SAFETY: only `slice` reads it, and its caller guarantees disjoint ranges: each T belongs to one thread at a time,
// which T: Send allows.
unsafe impl<T: Send> Send for Shared<T> {}
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Shares the slice, which must stay alive as long as threads use it.
    pub fn new(slice: &mut [T]) -> Self {
        Shared(slice.as_mut_ptr())
    }

    /// Returns these elements for writing.
    ///
    /// # Safety
    /// The range lies inside the slice that this was made from, the slice is still alive, and no other thread uses the
    /// range.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        std::slice::from_raw_parts_mut(self.0.add(range.start), range.len())
    }
}

/// Returns the least number of rows that are worth a thread of their own: about 16,384 numbers in rows of `cols`.
pub fn grain(cols: usize) -> usize {
    (16 * 1024 / cols.max(1)).max(1)
}

/// Calls `work` as [`for_each`] does, with a range of rows and the index range of all their numbers, `cols` per row.
pub fn over_rows(rows: usize, cols: usize, work: impl Fn(Range<usize>, Range<usize>) + Sync) {
    for_each(rows, grain(cols), |r| work(r.clone(), numbers(&r, cols)));
}

/// Returns the index range of the numbers in these rows, with `cols` numbers per row.
pub fn numbers(rows: &Range<usize>, cols: usize) -> Range<usize> {
    rows.start * cols..rows.end * cols
}

/// Calls `work` with a range of rows and the index range of their numbers, once per thread. Each call adds to sums of
/// its own, which start at zero and have the lengths of `sums`. Then `sums` receives the totals. They are added in the
/// order of the ranges, so the result depends only on the number of threads.
pub fn sum_over_rows<A, F, const N: usize>(rows: usize, cols: usize, sums: [&mut [A]; N], work: F)
where
    A: Copy + Default + std::ops::AddAssign + Send + Sync,
    F: Fn(Range<usize>, Range<usize>, [&mut [A]; N]) + Sync,
{
    let lengths = sums.each_ref().map(|s| s.len());
    // Each part of the rows has a copy of all sums, one after the other.
    let per_part: usize = lengths.iter().sum();
    let parts = threads().min(rows.div_ceil(grain(cols))).max(1);
    let mut partial = memory::filled(A::default(), parts * per_part);
    let shared = Shared::new(&mut partial);
    for_each(parts, 1, |range| {
        for part in range {
            // SAFETY: each part has its own `per_part` numbers, and is in exactly one range.
            let mut rest = unsafe { shared.slice(part * per_part..(part + 1) * per_part) };
            // Splits the part's numbers into its sums: each step takes the next one from the front of `rest`.
            let own = lengths.map(|length| {
                let (head, tail) = std::mem::take(&mut rest).split_at_mut(length);
                rest = tail;
                head
            });
            let part_rows = rows * part / parts..rows * (part + 1) / parts;
            work(part_rows.clone(), numbers(&part_rows, cols), own);
        }
    });
    let mut start = 0; // where this sum begins in each part
    for sum in sums {
        sum.fill(A::default());
        for part in partial.chunks_exact(per_part.max(1)) {
            for (s, p) in sum.iter_mut().zip(&part[start..]) {
                *s += *p;
            }
        }
        start += sum.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    /// Every type implements this trait once, and a type that is Send implements it twice. So a call of `either` with
    /// an inferred A compiles only if the type is not Send.
    trait Either<A> {
        fn either() {}
    }
    impl<T> Either<()> for T {}
    impl<T: Send> Either<u8> for T {}

    #[test]
    fn what_is_no_send_is_not_shared() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<Shared<f32>>();
        // If `Shared<Rc<()>>` were Send, this call would be ambiguous and would not compile.
        <Shared<Rc<()>> as Either<_>>::either();
    }
}
