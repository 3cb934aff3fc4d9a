//! The last act: more servers die at once than pages outlive.
//!
//! The rule it keeps: a page is right, or an error that names a server that has died, by the
//! deadline. Other bytes never come.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farpage::{Advice, RemoteArray};
use farpage_bench_kit::pick::{Random, Shuffle};

use super::{report::End, servers::Servers};

/// Deadline of the runtime.
pub(super) const DEADLINE: Duration = Duration::from_secs(10);
/// Time beyond the deadline after which an error is late. The runtime counts no stretches of more
/// than a tenth of a second in which none of its threads ran: on a machine with 30 programs for two
/// processors an error took 20 s.
const LATE: Duration = Duration::from_secs(20);

/// Kills `count` servers, and reads the pages of `array` until as many `errors` came, each of which
/// may take as long as the deadline. Returns the findings, and the number of words that are not
/// those of `plain`.
pub(super) fn act(
    array: &RemoteArray<u64>,
    plain: &[u64],
    page_words: usize,
    servers: &mut Servers,
    (count, errors): (usize, u64),
    random: &mut Random,
) -> Result<(End, u64)> {
    array.flush()?;
    array.advise(.., Advice::DontNeed)?;
    let killed = servers.some(count, random);
    servers.kill(&killed)?;
    let mut wrong = 0;
    let mut end = End {
        killed,
        right_pages: 0,
        failed_pages: 0,
        error_s_max: 0.0,
        error: None,
    };
    for page in Shuffle::new((plain.len() / page_words) as u64, random.bits()) {
        let first = page as usize * page_words;
        let range = first..first + page_words;
        let begin = Instant::now();
        match array.prefetch_now(range.clone()) {
            Ok(()) => {
                let words = array[range.clone()].iter().zip(&plain[range]);
                let differing = words.filter(|(word, kept)| word != kept).count() as u64;
                wrong += differing;
                end.right_pages += u64::from(differing == 0);
            }
            Err(error) => {
                let (took, error) = (begin.elapsed(), error.to_string());
                ensure!(
                    end.killed.iter().any(|url| error.contains(url)),
                    "an error names no server that has died: {error}"
                );
                ensure!(
                    took < DEADLINE + LATE,
                    "an error came after {took:?}, with a deadline of {DEADLINE:?}: {error}"
                );
                end.failed_pages += 1;
                end.error_s_max = end.error_s_max.max(took.as_secs_f64());
                eprintln!("page {page}: {error}");
                end.error.get_or_insert(error);
            }
        }
        if end.failed_pages == errors || wrong > 0 {
            break;
        }
    }
    Ok((end, wrong))
}
