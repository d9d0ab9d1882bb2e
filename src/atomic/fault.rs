//! Injected failures, for tests. Before every system call that writes into a run's folder, the program calls [`point`]
//! with the call's name. Each such call of `point` is a place, at which a test can kill the process or report a full
//! disk.
//!
//! `NORMFORMER_RS_FAULT=kill:K` sends the process SIGKILL at the K-th place that it passes (counted from 1), for
//! tests that start the program as a process. `stop:K` sends SIGSTOP there, so that the process waits for SIGCONT.
//! `enospc:K` reports a full disk there and at every later place of the same operation. `eio:K` reports an
//! input/output error only there. `short:K` reports such an error after half of the bytes, if that place writes any.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// The environment variable with the fault; it is read when the process passes its first place.
pub const VARIABLE: &str = "NORMFORMER_RS_FAULT";

/// A failure and the place, counted from 1, at which it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Sends SIGKILL to this process at the K-th place.
    Kill(usize),
    /// Sends SIGSTOP to this process at the K-th place.
    Stop(usize),
    /// Reports "No space left on device" at the K-th place, and at every later one until [`begin`].
    Enospc(usize),
    /// Reports "Input/output error" at the K-th place alone.
    Eio(usize),
    /// Reports "Input/output error" after half of the bytes that the K-th place writes.
    Short(usize),
    /// Injects no failure, and only counts places.
    Count,
}

/// The planned fault, and how many places have been passed on the way to it.
struct Plan {
    fault: Fault,
    /// The number of places passed so far.
    passed: usize,
    /// The only thread to which the plan applies; `None` means every thread.
    thread: Option<ThreadId>,
}

impl Plan {
    fn is_for_this_thread(&self) -> bool {
        self.thread.is_none_or(|t| t == thread::current().id())
    }
}

// The values of STATE: the environment variable has not been read yet, there is no plan, or there is one.
const UNREAD: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNREAD);
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
#[cfg(test)]
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Counts the place before the system call `name`, and returns `Ok` unless a fault is planned here. Without a plan,
/// this costs one relaxed load.
///
/// # Errors
/// Returns the planned ENOSPC or EIO, or `InvalidInput` if the environment variable cannot be parsed.
#[inline]
pub fn point(name: &str) -> io::Result<()> {
    match STATE.load(Ordering::Relaxed) {
        OFF => Ok(()),
        _ => pass_place(name),
    }
}

/// True if the planned fault is a short write, and the place that was passed last is that of the fault. A caller that
/// gets an error from [`point`] asks this, and then writes half of its bytes.
pub fn is_short() -> bool {
    let is_planned = |p: &Plan| p.is_for_this_thread() && p.fault == Fault::Short(p.passed);
    STATE.load(Ordering::Relaxed) == ON && lock(&PLAN).as_ref().is_some_and(is_planned)
}

/// Begins a new operation: if an injected fault has filled the disk, the disk is free again.
pub fn begin() {
    if STATE.load(Ordering::Relaxed) == ON {
        if let Some(plan) = &mut *lock(&PLAN) {
            let is_full = matches!(plan.fault, Fault::Enospc(k) if plan.passed >= k);
            if is_full && plan.is_for_this_thread() {
                plan.fault = Fault::Count;
            }
        }
    }
}

/// Plans `fault` for the calling thread until the guard is dropped; places are counted from this call on. Only one
/// plan exists at a time, so a second caller waits.
#[cfg(test)]
pub fn arm(fault: Fault) -> Armed {
    let turn = lock(&ONE_AT_A_TIME);
    *lock(&PLAN) = Some(Plan { fault, passed: 0, thread: Some(thread::current().id()) });
    STATE.store(ON, Ordering::Relaxed);
    Armed { _turn: turn }
}

/// A guard that keeps a fault planned; see [`arm`].
#[cfg(test)]
pub struct Armed {
    /// The lock that makes other callers of [`arm`] wait.
    _turn: MutexGuard<'static, ()>,
}

#[cfg(test)]
impl Armed {
    /// Returns the number of places that the calling thread has passed since [`arm`].
    pub fn passed(&self) -> usize {
        lock(&PLAN).as_ref().map_or(0, |plan| plan.passed)
    }
}

#[cfg(test)]
impl Drop for Armed {
    /// Ends the plan, so that no fault happens any more.
    fn drop(&mut self) {
        *lock(&PLAN) = None;
        STATE.store(OFF, Ordering::Relaxed);
    }
}

/// Counts a place, and causes the fault if one is planned there. The first call reads the environment variable.
#[cold]
fn pass_place(name: &str) -> io::Result<()> {
    let mut plan = lock(&PLAN);
    if STATE.load(Ordering::Relaxed) == UNREAD {
        if let Some(text) = std::env::var_os(VARIABLE) {
            let fault = parse(&text.to_string_lossy())?;
            *plan = Some(Plan { fault, passed: 0, thread: None });
        }
        STATE.store(if plan.is_some() { ON } else { OFF }, Ordering::Relaxed);
    }
    // Threads to which the plan does not apply pass no places.
    let Some(plan) = plan.as_mut().filter(|p| p.is_for_this_thread()) else {
        return Ok(());
    };
    plan.passed += 1;
    match plan.fault {
        Fault::Kill(k) if plan.passed == k => {
            eprintln!("{VARIABLE}: killed at place {k}, before: {name}");
            // SAFETY: kill takes no pointer.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            // The signal may arrive a moment later; until then the thread must not go on.
            loop {
                thread::park();
            }
        }
        Fault::Stop(k) if plan.passed == k => {
            // SAFETY: kill takes no pointer. The process stops here, until it gets SIGCONT.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
            Ok(())
        }
        Fault::Enospc(k) if plan.passed >= k => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        Fault::Eio(k) | Fault::Short(k) if plan.passed == k => Err(io::Error::from_raw_os_error(libc::EIO)),
        _ => Ok(()),
    }
}

/// Parses the environment variable's value, such as "kill:3".
fn parse(text: &str) -> io::Result<Fault> {
    let number = |k: &str| k.parse().ok().filter(|&k| k > 0);
    let fault = match text.split_once(':') {
        Some(("kill", k)) => number(k).map(Fault::Kill),
        Some(("stop", k)) => number(k).map(Fault::Stop),
        Some(("enospc", k)) => number(k).map(Fault::Enospc),
        Some(("eio", k)) => number(k).map(Fault::Eio),
        Some(("short", k)) => number(k).map(Fault::Short),
        _ => None,
    };
    fault.ok_or_else(|| {
        let message =
            format!("{VARIABLE} must be kill:K, stop:K, enospc:K, eio:K or short:K with K from 1; got {text:?}");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    })
}

/// Locks the mutex even if it is poisoned, so that a test that panicked with the lock does not fail other tests.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_is_full_from_place_k_until_the_next_operation() {
        let armed = arm(Fault::Enospc(2));
        let full = |name| point(name).is_err_and(|e| e.kind() == io::ErrorKind::StorageFull);
        assert_eq!([full("a"), full("b"), full("c")], [false, true, true]);
        begin();
        assert!(!full("d"));
        assert_eq!(armed.passed(), 4);
    }

    #[test]
    fn beginning_an_operation_before_the_fault_leaves_it_planned() {
        let _armed = arm(Fault::Enospc(2));
        assert!(point("a").is_ok());
        begin();
        assert!(point("b").is_err());
    }

    #[test]
    fn a_plan_is_for_its_own_thread() {
        let armed = arm(Fault::Enospc(1));
        thread::spawn(|| point("elsewhere").expect("no fault on another thread")).join().unwrap();
        assert_eq!(armed.passed(), 0);
        drop(armed);
        let armed = arm(Fault::Count);
        assert!(point("here").is_ok());
        assert_eq!(armed.passed(), 1);
    }

    #[test]
    fn the_variable_is_read_strictly() {
        assert_eq!(parse("kill:3").unwrap(), Fault::Kill(3));
        assert_eq!(parse("enospc:1").unwrap(), Fault::Enospc(1));
        assert_eq!(parse("stop:2").unwrap(), Fault::Stop(2));
        assert_eq!([parse("eio:2").unwrap(), parse("short:9").unwrap()], [Fault::Eio(2), Fault::Short(9)]);
        for bad in ["", "kill", "kill:0", "kill:x", "halt:1", "kill:-1"] {
            let message = parse(bad).unwrap_err().to_string();
            assert!(
                message.contains("must be kill:K, stop:K, enospc:K, eio:K or short:K")
                    && message.contains(&format!("{bad:?}")),
                "{message}"
            );
        }
    }
}
