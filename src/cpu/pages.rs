//! Memory pages: how the process gets them from the system, and when it returns them.
//!
//! A tensor that has just been allocated may have no pages yet: the first write to each page interrupts the program,
//! and the system clears the page. With small pages, a norm of 64 MB spends nine tenths of its time on clearing. Large
//! pages are cleared in a fourth of that time, and memory that the process keeps is not cleared again.
//! So this module asks for large pages, and lets the process keep freed memory. With NORMFORMER_RS_ALLOCATOR=system it
//! does neither, and with `return` the process returns freed memory.

use std::sync::OnceLock;

/// The size of a large page in bytes.
const LARGE: usize = 2 << 20;

/// Asks glibc to keep freed memory: each update allocates activations of the same sizes, and fresh pages cost more
/// time than the arithmetic on them. With NORMFORMER_RS_ALLOCATOR=return, glibc instead returns every freed block at
/// once, so that the process holds only its tensors' memory, without gaps.
pub fn keep_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two integers and may be called at any time.
    unsafe {
        match setting().as_str() {
            "system" => {}
            "return" => {
                // Larger blocks are returned when freed. glibc raises this threshold by itself unless it is set.
                libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
            }
            _ => {
                // No block is mapped separately, because such a block would be returned when freed. The heap never
                // shrinks, and it grows by 64 MiB more than is needed.
                libc::mallopt(libc::M_MMAP_MAX, 0);
                libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
                libc::mallopt(libc::M_TOP_PAD, 64 << 20);
            }
        }
    }
}

/// Returns the heap's freed memory to the system.
pub fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time, and frees only unused memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Asks the system to use large pages for the buffer `result`, if it has no pages yet and is large enough. The caller
/// is about to write all of the buffer; large pages are cleared four times as fast as small ones. The system may
/// decline.
pub fn ask_for_large(result: *const [u8]) {
    static IS_ALLOWED: OnceLock<bool> = OnceLock::new();
    // A shorter buffer may have only half of its bytes, or none, in whole large pages.
    if result.len() < 2 * LARGE || !are_fresh(result) || !*IS_ALLOWED.get_or_init(|| setting() != "system") {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        let page = page_size();
        let start = result.cast::<u8>().addr();
        // madvise takes whole pages: `from` is rounded up and `to` is rounded down.
        let (from, to) = (start.next_multiple_of(page), (start + result.len()) / page * page);
        // SAFETY: the range consists of whole pages inside `result`; the advice changes neither bytes nor access
        // rights.
        unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
    }
}

/// True if the system has not given the buffer `result` its pages yet, judging by its middle page. Always false outside
/// Linux.
pub fn are_fresh<T>(result: *const [T]) -> bool {
    #[cfg(target_os = "linux")]
    {
        let page = page_size();
        let middle = result.cast::<T>().addr() + result.len() * size_of::<T>() / 2;
        let mut is_there = 1u8;
        // SAFETY: the call writes one byte, `is_there`. It does not access the page, and fails for one that the process
        // has not mapped.
        let status = unsafe { libc::mincore((middle / page * page) as *mut libc::c_void, 1, &raw mut is_there) };
        // The lowest bit is 1 if the page is in memory.
        status == 0 && is_there & 1 == 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = result;
        false
    }
}

/// Returns the value of NORMFORMER_RS_ALLOCATOR.
fn setting() -> String {
    std::env::var("NORMFORMER_RS_ALLOCATOR").unwrap_or_default()
}

/// Returns the size of a page in bytes.
#[cfg(target_os = "linux")]
fn page_size() -> usize {
    // SAFETY: it may be called at any time.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::ptr::null_mut;
    use std::slice;

    /// Maps `len` bytes that have no pages, directly from the system.
    fn mapped(len: usize) -> &'static mut [u8] {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: it is new memory that nobody unmaps.
        unsafe { slice::from_raw_parts_mut(libc::mmap(null_mut(), len, rights, kind, -1, 0).cast(), len) }
    }

    /// True if the system may use large pages for the memory around `address`, according to /proc/self/smaps.
    fn advised(address: *const u8) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // A map begins with a line that starts with its range, FROM-TO in hexadecimal digits; its flags come later.
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = range.map(|(from, to)| [from, to].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(from), Ok(to)]) = ends {
                inside = (from..to).contains(&address.addr());
            } else if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
                // The flag "hg" stands for MADV_HUGEPAGE.
                return flags.split_whitespace().any(|flag| flag == "hg");
            }
        }
        panic!("no map holds {address:?}")
    }

    #[test]
    fn pages_are_fresh_until_they_are_written() {
        let memory = mapped(LARGE);
        assert!(are_fresh(&*memory));
        memory.fill(1);
        assert!(!are_fresh(&*memory));
    }

    #[test]
    fn large_pages_are_asked_for_where_none_is_there() {
        let (small, large, written) = (mapped(2 * LARGE - 1), mapped(4 * LARGE), mapped(4 * LARGE));
        written.fill(1);
        for memory in [&small, &large, &written] {
            ask_for_large(&**memory);
        }
        let middles = [&small, &large, &written].map(|memory| advised(&memory[memory.len() / 2]));
        assert_eq!(middles, [false, true, false]);
        large[7] = 3;
        assert_eq!(large.iter().map(|&v| v as u64).sum::<u64>(), 3);
    }
}
