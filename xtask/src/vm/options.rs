//! [`Options`] of the virtual machine, and their reading from a command line.

use std::{env, time::Duration};

use anyhow::{Context, Result, bail};

/// Size, network and kernel of the machine, and its time limit.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) time_max: Duration,
    pub(crate) hosts: u32,
    pub(crate) suite: String,
    /// Mirror of the kernel's packages. `None`: apt's source of Debian's packages.
    pub(crate) mirror: Option<String>,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
}

impl Default for Options {
    /// Chooses the oldest kernel that can have one RDMA device per network namespace, and so
    /// several hosts. Linux 6.8 and newer move pages (`UFFDIO_MOVE`).
    fn default() -> Options {
        Options {
            time_max: Duration::from_secs(600),
            hosts: 2,
            suite: "trixie-backports".to_owned(),
            mirror: env::var("FARPAGE_VM_MIRROR")
                .ok()
                .filter(|mirror| !mirror.is_empty()),
            cpus: 2,
            memory_mib: 4096,
        }
    }
}

impl Options {
    /// Reads options up to the command, which is returned with them.
    pub(super) fn read(args: &[String]) -> Result<(Options, &[String])> {
        let mut options = Options::default();
        let mut rest = args;
        while let Some((option, more)) = rest.split_first() {
            if option == "--" {
                rest = more;
                break;
            }
            if !option.starts_with('-') {
                break;
            }
            let (value, more) = more
                .split_first()
                .with_context(|| format!("`{option}` takes a value"))?;
            let number = |max: u32| match value.parse::<u32>() {
                Ok(number) if number <= max => Ok(number),
                _ => bail!("`{option}` takes a number up to {max}, not `{value}`"),
            };
            match option.as_str() {
                "--timeout" => options.time_max = Duration::from_secs(number(86_400)?.into()),
                "--hosts" => options.hosts = number(9)?,
                "--suite" => options.suite = value.clone(),
                "--mirror" => options.mirror = Some(value.clone()),
                "--cpus" => options.cpus = number(255)?.max(1),
                "--memory" => options.memory_mib = number(1 << 20)?,
                _ => bail!("no such option: `{option}`"),
            }
            rest = more;
        }
        match rest {
            [] => bail!("which command?"),
            command => Ok((options, command)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_end_where_the_command_begins() {
        let read = |line: &str| {
            let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
            Options::read(&args).map(|(options, command)| (options, command.to_vec()))
        };
        let (options, command) = read("--hosts 3 ls --cpus 4").expect("it is a command");
        assert_eq!((options.hosts, options.cpus), (3, 2));
        assert_eq!(command, ["ls", "--cpus", "4"]);
        let (_, command) = read("-- --odd").expect("it is a command");
        assert_eq!(command, ["--odd"]);
        for wrong in [
            "--hosts 3",
            "--hosts",
            "--hosts ten ls",
            "--what 3 ls",
            "--hosts 10 ls",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
