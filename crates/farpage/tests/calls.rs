//! System calls on remote memory with in-thread faults: nothing fails, nothing is lost, and a call
//! transfers as much as with local memory.
//!
//! The rule it keeps: memory that a call is given is absent when the call begins, and a thread that
//! sweeps over more than the budget takes pages out while they come in.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut, pipe},
    mem,
    net::{TcpListener, TcpStream, UdpSocket},
    os::{
        fd::AsRawFd,
        unix::{fs::FileExt, net::UnixDatagram},
    },
    ptr,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use common::{Fabric, Memory, begin, builder, words::bytes};
use farpage::{Advice, FaultMode, Region, Runtime, io};
use farpage_testkit::{KIB, MIB};

const PAGE: usize = 4 * KIB;

fn runtime(memory: &Memory) -> Runtime {
    let builder = builder(256 * KIB, PAGE).fault_mode(FaultMode::InThread);
    builder.server(&memory.url).build().unwrap()
}

/// Runs `work` with a region of `bytes` bytes while another thread sweeps over four budgets.
fn under_pressure(bytes: usize, work: impl FnOnce(&mut Region)) {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = runtime(&memory);
    let mut region = runtime.region(bytes).unwrap();
    let others = runtime.region(MIB).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sweeper = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for at in (0..others.len()).step_by(PAGE) {
                    assert_eq!(others[at], 0);
                }
            }
        });
        // The sweeper ends however `work` ends.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&mut region)));
        stop.store(true, Ordering::Relaxed);
        sweeper.join().unwrap();
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

fn give_up(region: &Region) {
    region.advise(.., Advice::DontNeed).unwrap();
}

#[test]
fn files_are_read_and_written_whole_whatever_the_budget() {
    under_pressure(2 * MIB, |region| {
        let (file, expected) = (tempfile::tempfile().unwrap(), bytes(2 * MIB, 1));
        file.write_all_at(&expected, 0).unwrap();
        let whole = 2 * MIB;
        for position in [0, 12_345] {
            give_up(region);
            let read = io::pread(&file, region, position).unwrap();
            assert_eq!(read, whole - position as usize);
            assert!(region[..read] == expected[position as usize..]);
        }
        region.fill(0);
        give_up(region);
        assert_eq!(io::read(&file, region).unwrap(), whole);
        assert!(region[..] == expected);
        assert_eq!(io::read(&file, &mut region[..9]).unwrap(), 0);

        let copy = tempfile::tempfile().unwrap();
        give_up(region);
        assert_eq!(io::write(&copy, region).unwrap(), whole);
        give_up(region);
        assert_eq!(io::pwrite(&copy, &region[..MIB], 3).unwrap(), MIB);
        let mut written = vec![0; whole];
        copy.read_exact_at(&mut written, 0).unwrap();
        assert!(written[3..3 + MIB] == expected[..MIB]);
        assert!(written[3 + MIB..] == expected[3 + MIB..]);
        assert_eq!(copy.metadata().unwrap().len(), whole as u64);
    });
}

#[test]
fn ten_buffers_are_filled_and_written_in_order() {
    under_pressure(2 * MIB, |region| {
        let (file, expected) = (tempfile::tempfile().unwrap(), bytes(MIB, 2));
        file.write_all_at(&expected, 0).unwrap();
        // Buffers of different lengths, one of them empty, with gaps between them.
        let length = |which: usize| which * 17_001;
        for position in [None, Some(77)] {
            region.fill(9);
            give_up(region);
            let mut buffers: Vec<_> = region
                .chunks_mut(2 * MIB / 10)
                .take(10)
                .enumerate()
                .map(|(which, chunk)| IoSliceMut::new(&mut chunk[..length(which)]))
                .collect();
            let read = match position {
                None => io::readv(&file, &mut buffers).unwrap(),
                Some(position) => io::preadv(&file, &mut buffers, position).unwrap(),
            };
            assert_eq!(read, (0..10).map(length).sum::<usize>());
            let mut from = position.unwrap_or(0) as usize;
            for (which, chunk) in region.chunks(2 * MIB / 10).take(10).enumerate() {
                let (filled, rest) = chunk.split_at(length(which));
                assert!(
                    filled == &expected[from..from + filled.len()],
                    "buffer {which}"
                );
                assert!(rest.iter().all(|&byte| byte == 9), "behind buffer {which}");
                from += filled.len();
            }
        }
        let out = tempfile::tempfile().unwrap();
        give_up(region);
        let buffers: Vec<_> = region
            .chunks(2 * MIB / 10)
            .take(10)
            .enumerate()
            .map(|(which, chunk)| IoSlice::new(&chunk[..length(which)]))
            .collect();
        let written = io::writev(&out, &buffers).unwrap();
        assert_eq!(
            io::pwritev(&out, &buffers, written as u64).unwrap(),
            written
        );
        let mut back = vec![0; 2 * written];
        out.read_exact_at(&mut back, 0).unwrap();
        assert!(back[..written] == expected[77..77 + written]);
        assert!(back[written..] == expected[77..77 + written]);
    });
}

#[test]
fn streams_lose_nothing_and_a_write_is_done_whole() {
    under_pressure(4 * MIB, |region| {
        let expected = bytes(2 * MIB, 3);
        let (mut from, to) = region.split_at_mut(2 * MIB);
        from.copy_from_slice(&expected);
        let (reader, writer) = pipe().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let from = &mut from;
        thread::scope(|scope| {
            let from = &from[..];
            scope.spawn(move || {
                // A blocking write writes everything.
                assert_eq!(io::write(&writer, from).unwrap(), from.len());
                assert_eq!(io::send(&client, from, 0).unwrap(), from.len());
            });
            let mut done = 0;
            while done < to.len() {
                let end = (done + 100_000).min(to.len());
                let read = io::read(&reader, &mut to[done..end]).unwrap();
                assert!(read > 0);
                done += read;
            }
            assert!(to == &expected[..]);
            to.fill(0);
            let read = io::recv(&server, to, libc::MSG_WAITALL).unwrap();
            assert_eq!(read, to.len());
            assert!(to == &expected[..]);
        });
    });
}

#[test]
fn no_datagram_is_lost_or_cut() {
    under_pressure(MIB, |region| {
        let (a, b) = (
            UdpSocket::bind("127.0.0.1:0").unwrap(),
            UdpSocket::bind("127.0.0.1:0").unwrap(),
        );
        let to = b.local_addr().unwrap();
        b.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        for round in 0..200 {
            let expected = bytes(1 + round * 300, round as u64);
            region[..expected.len()].copy_from_slice(&expected);
            give_up(region);
            let sent = io::sendto(&a, &region[..expected.len()], 0, to).unwrap();
            assert_eq!(sent, expected.len());
            region.fill(0);
            give_up(region);
            let (received, from) = io::recvfrom(&b, &mut region[500..], 0).unwrap();
            assert_eq!((received, from), (sent, Some(a.local_addr().unwrap())));
            assert!(region[500..500 + received] == expected);
        }
        // A message longer than the 128 KiB that other calls move at once.
        let (c, d) = UnixDatagram::pair().unwrap();
        let expected = bytes(180_000, 5);
        region[..expected.len()].copy_from_slice(&expected);
        give_up(region);
        assert_eq!(
            io::send(&c, &region[..expected.len()], 0).unwrap(),
            expected.len()
        );
        region.fill(0);
        give_up(region);
        let mut buffers = region.chunks_mut(100_000);
        let mut list: [libc::iovec; 3] = [(); 3].map(|()| {
            let buffer = buffers.next().unwrap();
            libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            }
        });
        // SAFETY: all zeros is a message of nothing.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (list.as_mut_ptr(), 3);
        // SAFETY: buffers of the region, which is borrowed by this test alone.
        let received = unsafe { io::recvmsg(&d, &mut message, 0) }.unwrap();
        assert_eq!((received, message.msg_flags), (expected.len(), 0));
        assert!(region[..received] == expected);
    });
}

#[test]
fn descriptors_travel_with_remote_messages() {
    under_pressure(MIB, |region| {
        let (a, b) = UnixDatagram::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"sent", 0).unwrap();
        let at = region.as_mut_ptr();
        // Everything is remote: the message, its buffers, their list, and the control data.
        // SAFETY: parts of the region that do not overlap, and are aligned.
        unsafe {
            let message = at.cast::<libc::msghdr>();
            let list = at.add(PAGE).cast::<libc::iovec>();
            let control = at.add(2 * PAGE);
            let space = libc::CMSG_SPACE(4) as usize;
            *list = libc::iovec {
                iov_base: at.add(3 * PAGE).cast(),
                iov_len: 5,
            };
            at.add(3 * PAGE).copy_from(b"hello".as_ptr(), 5);
            *message = mem::zeroed();
            ((*message).msg_iov, (*message).msg_iovlen) = (list, 1);
            ((*message).msg_control, (*message).msg_controllen) = (control.cast(), space);
            let head = libc::CMSG_FIRSTHDR(message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(head).cast::<i32>().write(file.as_raw_fd());
            give_up(region);
            assert_eq!(io::sendmsg(&a, &*message, 0).unwrap(), 5);
            control.write_bytes(0, space);
            at.add(3 * PAGE).write_bytes(0, 5);
            give_up(region);
            assert_eq!(io::recvmsg(&b, &mut *message, 0).unwrap(), 5);
            assert_eq!(&region[3 * PAGE..3 * PAGE + 5], b"hello");
            let fd = libc::CMSG_DATA(libc::CMSG_FIRSTHDR(message))
                .cast::<i32>()
                .read();
            let received: File = std::os::fd::FromRawFd::from_raw_fd(fd);
            let mut contents = [0; 4];
            received.read_exact_at(&mut contents, 0).unwrap();
            assert_eq!(&contents, b"sent");
        }
    });
}

/// Gives the region up and returns the address of its second page.
fn absent(region: &mut Region) -> usize {
    give_up(region);
    region.as_ptr() as usize + PAGE
}

#[test]
fn calls_that_cannot_be_repeated_say_what_they_did() {
    under_pressure(MIB, |region| {
        let call = |number, arguments| {
            // SAFETY: calls on memory of the region and on this test's own descriptors.
            unsafe { io::system_call(number, arguments) }
        };
        // A child is reaped once.
        // SAFETY: the child does nothing but end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child.
            unsafe { libc::_exit(7) };
        }
        let at = absent(region);
        let reaped = call(libc::SYS_wait4, [child as usize, at, 0, 0, 0, 0]).unwrap();
        assert_eq!(reaped, child as usize);
        assert_eq!(region[PAGE..PAGE + 4], (7_i32 << 8).to_ne_bytes());

        // A connection is accepted once.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        region[2 * PAGE..2 * PAGE + 4].copy_from_slice(&16_u32.to_ne_bytes());
        let at = absent(region);
        let arguments = [listener.as_raw_fd() as usize, at, at + PAGE, 0, 0, 0];
        let accepted = call(libc::SYS_accept, arguments).unwrap();
        // SAFETY: made just now.
        unsafe { libc::close(accepted as i32) };
        let port = client.local_addr().unwrap().port();
        assert_eq!(region[PAGE + 2..PAGE + 4], port.to_be_bytes());
        assert_eq!(region[2 * PAGE..2 * PAGE + 4], 16_u32.to_ne_bytes());

        // A set of descriptors is read before it is written.
        let (reader, writer) = pipe().unwrap();
        io::write(&writer, b"x").unwrap();
        let fd = reader.as_raw_fd() as usize;
        let (word, bit) = (PAGE + fd / 64 * 8, 1_u64 << (fd % 64));
        region[PAGE..2 * PAGE].fill(0);
        region[word..word + 8].copy_from_slice(&bit.to_ne_bytes());
        let at = absent(region);
        assert_eq!(call(libc::SYS_select, [fd + 1, at, 0, 0, 0, 0]).unwrap(), 1);
        assert_eq!(region[word..word + 8], bit.to_ne_bytes());

        // A wrong call still fails, with its own error.
        let error = call(libc::SYS_read, [999_999, absent(region), 10, 0, 0, 0]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        let error = call(libc::SYS_stat, [8, absent(region), 0, 0, 0, 0]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        // Paths and results of calls that are repeated.
        region[PAGE..PAGE + 5].copy_from_slice(b"/tmp\0");
        let at = absent(region);
        assert_eq!(
            call(libc::SYS_stat, [at, at + 9 * PAGE - 8, 0, 0, 0, 0]).unwrap(),
            0
        );
    });
}

#[test]
fn a_thread_sleeps_on_a_remote_word_until_it_is_woken() {
    under_pressure(MIB, |region| {
        for round in 0..50 {
            region[PAGE..PAGE + 4].fill(0);
            let at = absent(region);
            // SAFETY: an aligned word of the region, which outlives the threads.
            let word = unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(at)) };
            let futex = |operation: i32, value: usize| {
                let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
                // SAFETY: a word of the region.
                unsafe { io::system_call(libc::SYS_futex, [at, operation, value, 0, 0, 0]) }
            };
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| {
                    loop {
                        match futex(libc::FUTEX_WAIT, 0) {
                            Ok(_) => {}
                            Err(error) => {
                                assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{round}");
                                break;
                            }
                        }
                    }
                });
                thread::sleep(Duration::from_micros(200));
                word.store(1, Ordering::SeqCst);
                futex(libc::FUTEX_WAKE, 1).unwrap();
                sleeper.join().unwrap();
            });
        }
    });
}
