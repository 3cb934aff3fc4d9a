//! Frames of control messages: a length, and that many bytes.
//!
//! The rule it keeps: a frame is bounded before it is read ([`frame_bytes`]) and decoded only when
//! it is complete.

use serde::{Serialize, de::DeserializeOwned};

/// Length of the prefix of a control frame.
pub const PREFIX_BYTES: usize = 4;

/// The longest control frame: a manifest of
/// [`MAX_MANIFEST_BYTES`](super::MAX_MANIFEST_BYTES) with its extents.
pub const MAX_FRAME_BYTES: usize = 24 << 20;

/// The longest first frame of a connection, so that a stranger cannot make the server hold much.
pub const MAX_FIRST_FRAME_BYTES: usize = 4 << 10;

/// Reason why a hello or a frame was not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlDecodeError {
    /// Bytes of another protocol.
    #[error("the peer does not speak the farpage protocol")]
    NotFarpage,
    /// A hello of another version of our protocol.
    #[error(
        "the peer speaks version {theirs} of the protocol and this build speaks {ours}: bring both to the same release"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
        /// Version of this build.
        ours: u16,
    },
    /// A hello of the right version with an impossible rest.
    #[error("malformed hello")]
    Hello,
    /// A frame beyond its limit.
    #[error("control frame of {bytes} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The announced or actual length.
        bytes: usize,
        /// The longest frame that is allowed here.
        limit: usize,
    },
    /// A frame that is no message.
    #[error("malformed control frame")]
    Frame,
}

/// Returns the frame of `message`: its length as a little-endian u32, then its bytes.
///
/// # Errors
/// [`ControlDecodeError::TooLong`] when the message exceeds [`MAX_FRAME_BYTES`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, ControlDecodeError> {
    let mut frame = postcard::to_extend(message, vec![0; PREFIX_BYTES])
        .expect("messages hold only types that postcard can write, and a vector grows");
    let bytes = frame.len() - PREFIX_BYTES;
    if bytes > MAX_FRAME_BYTES {
        return Err(ControlDecodeError::TooLong {
            bytes,
            limit: MAX_FRAME_BYTES,
        });
    }
    frame[..PREFIX_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
    Ok(frame)
}

/// Returns the number of bytes that follow a frame's `prefix`.
///
/// # Errors
/// [`ControlDecodeError::TooLong`] beyond `limit`, before anything is read or allocated.
pub fn frame_bytes(prefix: [u8; PREFIX_BYTES], limit: usize) -> Result<usize, ControlDecodeError> {
    let bytes = u32::from_le_bytes(prefix) as usize;
    if bytes > limit {
        return Err(ControlDecodeError::TooLong { bytes, limit });
    }
    Ok(bytes)
}

/// Reads a message from `bytes`, which are all the bytes behind the prefix.
///
/// # Errors
/// [`ControlDecodeError::Frame`] when `bytes` are no such message or some are left over.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ControlDecodeError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(ControlDecodeError::Frame),
    }
}
