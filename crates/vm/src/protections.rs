//! Protections of mappings, as the kernel lists them: [`protections`].

use std::{ffi::c_int, fs, io, ops::Range};

/// Returns the mapped parts of `addresses`, ascending, with the protection of each.
///
/// # Errors
/// The list of this process's mappings, `/proc/self/maps`, cannot be read.
pub fn protections(addresses: &Range<usize>) -> io::Result<Vec<(Range<usize>, c_int)>> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let parts = maps
        .lines()
        .filter_map(mapping)
        .map(|(mapped, protection)| {
            let part = mapped.start.max(addresses.start)..mapped.end.min(addresses.end);
            (part, protection)
        });
    Ok(parts.filter(|(part, _)| !part.is_empty()).collect())
}

/// Returns the addresses and the protection of a line such as `7f00-7f10 rw-p 0 00:00 0`.
fn mapping(line: &str) -> Option<(Range<usize>, c_int)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let bits = [
        (b'r', libc::PROT_READ),
        (b'w', libc::PROT_WRITE),
        (b'x', libc::PROT_EXEC),
    ];
    let letters = words.next()?.bytes().zip(bits);
    let set = letters.filter(|(letter, (name, _))| letter == name);
    let protection = set.map(|(_, (_, bit))| bit).sum();
    Some((address(start)?..address(end)?, protection))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_their_protections() {
        let line = "7f5d1000-7f5d3000 r-xp 00026000 fd:00 1234  /usr/lib/a b.so";
        let code = libc::PROT_READ | libc::PROT_EXEC;
        assert_eq!(mapping(line), Some((0x7f5d_1000..0x7f5d_3000, code)));
        let line = "7f5d1000-7f5d3000 ---s 0 00:00 0 ";
        assert_eq!(mapping(line), Some((0x7f5d_1000..0x7f5d_3000, 0)));
        assert_eq!(mapping("7f5d1000"), None);
    }

    #[test]
    fn stacks_are_readable_and_writable() {
        let value = 5u64;
        let at = &raw const value as usize;
        let known = protections(&(at..at + 8)).unwrap();
        assert_eq!(known, [(at..at + 8, libc::PROT_READ | libc::PROT_WRITE)]);
    }
}
