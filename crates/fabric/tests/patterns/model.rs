//! A ring over a channel that places bytes in any order, against a plain queue.

use super::*;

/// A step of a program that uses a ring.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(usize),
    Flush,
    Progress,
    Receive,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0usize..300).prop_map(Step::Send),
        2 => Just(Step::Flush),
        3 => Just(Step::Progress),
        3 => Just(Step::Receive),
    ];
    prop::collection::vec(step, 1..400)
}

/// Runs the steps on a ring and on a queue. Returns where they differ.
fn against_a_queue(
    steps: &[Step],
    (mut sender, mut receiver): (RingSender, RingReceiver),
) -> Result<(), String> {
    let mut queue = VecDeque::new();
    let mut message = vec![7; 3];
    let mut receive = |queue: &mut VecDeque<Vec<u8>>| match receiver.receive(&mut message) {
        Err(error) => Err(error.to_string()),
        Ok(false) => Ok(()),
        Ok(true) => match queue.pop_front() {
            Some(sent) if sent == message => Ok(()),
            sent => Err(format!("received {message:?} for {sent:?}")),
        },
    };
    for (number, step) in steps.iter().enumerate() {
        match *step {
            Step::Send(bytes) => {
                let sent: Vec<u8> = (0..bytes).map(|i| (number * 31 + i) as u8 | 1).collect();
                match sender.send(&sent) {
                    Ok(()) => queue.push_back(sent),
                    Err(SendError::Full) => {}
                    Err(SendError::TooLong { bytes, capacity }) => assert!(bytes + 8 > capacity),
                    Err(error) => return Err(error.to_string()),
                }
            }
            Step::Flush => sender.flush().unwrap(),
            Step::Progress => sender.progress().unwrap(),
            Step::Receive => receive(&mut queue)?,
        }
    }
    // Everything arrives in the end, without another word from the sender.
    sender.flush().unwrap();
    for _ in 0..100_000 {
        if queue.is_empty() {
            return Ok(());
        }
        sender.progress().unwrap();
        receive(&mut queue)?;
    }
    Err(format!("{} messages never arrived", queue.len()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn messages_arrive_whole_and_in_order_however_bytes_are_placed(
        steps in steps(),
        lines in 1usize..12,
        seed in any::<u64>(),
        in_order in any::<bool>(),
    ) {
        against_a_queue(&steps, ring(lines * 64, seed, in_order, in_order)).map_err(TestCaseError::fail)?;
    }
}

/// Checks the broken twin, in which the tail overtakes the bytes.
#[test]
fn a_fabric_that_breaks_its_word_about_order_is_found_out() {
    let steps: Vec<_> = (0..50)
        .flat_map(|i| [Step::Send(i), Step::Flush, Step::Progress, Step::Receive])
        .collect();
    let found = (1..50).any(|seed| against_a_queue(&steps, ring(512, seed, false, true)).is_err());
    assert!(found, "the tests above would see nothing");
}
