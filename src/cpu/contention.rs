//! Shorter waits of libgomp's threads while other processes compete for the cores.
//!
//! At the end of a parallel region libgomp's threads spin for about 3 ms before they sleep. On quiet cores that is
//! fast. But if another process runs on one of the cores, the thread there is late. The spinning threads then keep it
//! from moving to one of their cores, and speed falls to a third. libgomp spins for only a few microseconds while it
//! has more threads than there are cores. So [`watch`] measures how long this process's threads wait for a core. While
//! these waits are long, [`watch`] keeps a team of idle threads. The number of working threads stays the same, and so
//! do the bits of their results.

use super::parallel;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::fs;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time between two measurements of the waits.
const WINDOW: Duration = Duration::from_millis(250);
/// Cores are crowded if all threads together wait longer than this for a core, in seconds per second.
const CROWDED: f64 = 0.1;
/// Cores are calm if all threads together wait less than this for a core, in seconds per second.
const CALM: f64 = 0.02;
/// The number of calm windows in a row that end a crowded period.
const CALM_WINDOWS: u32 = 8;

extern "C" {
    /// A function of libgomp's stable interface that runs `work` on a team of `threads`, including the calling thread.
    fn GOMP_parallel(work: extern "C" fn(*mut c_void), data: *mut c_void, threads: c_uint, flags: c_uint);
}

/// Starts a thread that measures waits until the returned value is dropped. Returns `None` if torch uses one thread,
/// which never waits for others, or if NORMFORMER_RS_WAITS=libgomp turns the watch off.
pub fn watch() -> Option<ContentionWatch> {
    let threads = parallel::threads();
    let is_off = std::env::var("NORMFORMER_RS_WAITS").is_ok_and(|v| v == "libgomp");
    (threads > 1 && !is_off).then(|| ContentionWatch(Background::start(move |ended| observe(threads, ended))))
}

/// The handle of the measuring thread, which ends when this is dropped.
pub struct ContentionWatch(#[allow(dead_code)] Background);

/// Measures the threads' waits in each window, and keeps an idle team while cores are crowded, until `ended` is
/// closed.
fn observe(threads: usize, ended: Receiver<()>) {
    // `team` holds the idle threads while cores are crowded, otherwise `None`.
    let (mut judge, mut team, mut waits_before) = (Judge::default(), None, waits());
    loop {
        let start = Instant::now();
        // Anything but a timeout means that `ended` is closed.
        if ended.recv_timeout(WINDOW) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let waits_now = waits();
        // A thread that is new in this window has no earlier count, so all its waits belong to the window.
        let waited: u64 = waits_now.iter().map(|(id, ns)| ns.saturating_sub(*waits_before.get(id).unwrap_or(&0))).sum();
        waits_before = waits_now;
        if judge.is_crowded(waited as f64 / start.elapsed().as_nanos() as f64) {
            team.get_or_insert_with(|| idle_team(threads));
        } else {
            team = None;
        }
    }
}

/// Returns for each thread of this process the nanoseconds for which it was ready but had no core. The map is empty
/// if the system does not count them.
fn waits() -> HashMap<String, u64> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let id_and_wait = |task: fs::DirEntry| {
        // The file has the thread's time on a core, its time of waiting for one, and its number of time slices.
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        Some((task.file_name().into_string().ok()?, text.split_whitespace().nth(1)?.parse().ok()?))
    };
    tasks.filter_map(id_and_wait).collect()
}

/// The state of the cores: a window above [`CROWDED`] makes them crowded, [`CALM_WINDOWS`] calm ones in a row end this.
#[derive(Default)]
struct Judge {
    crowded: bool,
    /// The number of calm windows in a row up to now.
    calm: u32,
}

impl Judge {
    /// Adds a window in which all threads together waited `share` seconds per second. Returns whether cores are crowded
    /// now.
    fn is_crowded(&mut self, share: f64) -> bool {
        self.calm = if share < CALM { self.calm + 1 } else { 0 };
        self.crowded = share > CROWDED || self.crowded && self.calm < CALM_WINDOWS;
        self.crowded
    }
}

/// Starts threads that only sleep. libgomp counts them beside the `threads` that work, so its count exceeds the number
/// of cores. They end when the returned value is dropped.
fn idle_team(threads: usize) -> Background {
    extern "C" fn nothing(_: *mut c_void) {}
    // The thread that starts the team adds nothing to libgomp's count, so the count becomes threads + size − 1: one
    // more than the cores. A team of one would start no thread.
    let (size, no_flags) = ((cores() + 2).saturating_sub(threads).max(2), 0);
    Background::start(move |ended| {
        // The team's threads stay asleep after this call, as long as the thread that started them lives.
        // SAFETY: `nothing` reads no data. libgomp ends the team's threads when this thread ends.
        unsafe { GOMP_parallel(nothing, std::ptr::null_mut(), size as c_uint, no_flags) };
        let _ = ended.recv();
    })
}

/// Returns the number of cores on which the calling thread may run. libgomp counts cores in the same way.
fn cores() -> usize {
    // SAFETY: the set is plain bits, which the call fills; pid 0 is the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => libc::CPU_COUNT(&set) as usize,
            _ => std::thread::available_parallelism().map_or(1, |n| n.get()),
        }
    }
}

/// A thread that is stopped and joined when this value is dropped.
struct Background {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Runs `run` on a new thread. Its receiver is closed when the returned value is dropped; then it must return.
    fn start(run: impl FnOnce(Receiver<()>) + Send + 'static) -> Self {
        let (end, ended) = channel();
        Background { end: Some(end), thread: Some(std::thread::spawn(move || run(ended))) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // This drops the sender, which closes the thread's receiver.
        self.end = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_crowded_window_begins_it_and_calm_ones_end_it() {
        let mut judge = Judge::default();
        assert!(![0.0, 0.05, 0.09].map(|share| judge.is_crowded(share)).contains(&true));
        assert!(judge.is_crowded(0.3) && judge.is_crowded(0.05), "neither crowded nor calm: as before");
        assert!((1..CALM_WINDOWS).all(|_| judge.is_crowded(0.0)));
        assert!(!judge.is_crowded(0.0) && !judge.is_crowded(0.05));
    }

    #[test]
    fn waiting_for_a_core_is_counted() {
        assert!(waits().len() > 1, "this test's thread and the main one");
    }

    /// Measures this process's processor time over short parallel regions with pauses between them, in which threads
    /// wait.
    fn time_spent() -> Duration {
        let now = || {
            // SAFETY: plain numbers, which the call fills.
            let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
            // SAFETY: the call fills `usage`, and keeps no pointer to it.
            unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
            let duration = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
            duration(usage.ru_utime) + duration(usage.ru_stime)
        };
        let start = now();
        for _ in 0..40 {
            parallel::for_each(parallel::threads(), 1, |_| ());
            std::thread::sleep(Duration::from_millis(3));
        }
        now() - start
    }

    #[test]
    fn an_idle_team_shortens_waits_and_its_end_lengthens_them() {
        if parallel::threads() < 2 || std::env::var_os("OMP_WAIT_POLICY").is_some() {
            return; // no thread waits for others, or the user chose how they wait
        }
        let long = time_spent();
        let team = idle_team(parallel::threads());
        std::thread::sleep(Duration::from_millis(20)); // lets the team begin
        let short = time_spent();
        drop(team);
        let again = time_spent();
        assert!(4 * short < long && 4 * short < again, "{long:?}, with an idle team {short:?}, after it {again:?}");
    }
}
