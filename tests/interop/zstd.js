// Section "zstd": one zstd frame, whole and bounded before it is opened. Its form is checked here, block by block;
// fzstd, a decoder in plain JavaScript, makes the content of it.

import { decompress } from 'fzstd'
import { equal, fromHex, join } from './bytes.js'
import { refuse } from './errors.js'

const MAGIC = fromHex('28b52ffd')
const MOST_FRAME = 16_842_752
const MOST_WINDOW = 8_388_608
const MOST_BLOCK = 131_072

/** The content of a frame, if it states at most `most` bytes. */
export function unpack(frame, most) {
  if (frame.length > MOST_FRAME) refuse('too-large', `a frame of ${frame.length} bytes`)
  const { size, end } = header(frame)
  if (size > BigInt(most)) refuse('too-large', `a content of ${size} bytes, of at most ${most}`)
  checkBlocks(frame, end)
  let content
  try {
    // fzstd fills up to a stated size with zeros, so it is given a header that states none, and a window for all.
    content = decompress(join(MAGIC, Uint8Array.of(0, 15 << 3), frame.subarray(end)))
  } catch (error) {
    refuse('bad-frame', error.message)
  }
  if (BigInt(content.length) !== size) refuse('bad-frame', `${content.length} bytes where ${size} were stated`)
  return content
}

/** The chunk of `size` bytes in a frame of the codec raw-zstd1. */
export function readRaw(frame, size) {
  const chunk = unpack(frame, size)
  if (chunk.length !== size) refuse('inconsistent', `${chunk.length} bytes for a chunk of ${size}`)
  return chunk
}

/** The stated size of the content, and where the header ends. */
function header(frame) {
  if (frame.length < 6 || !equal(frame.subarray(0, 4), MAGIC)) refuse('bad-frame', 'no zstd frame')
  const descriptor = frame[4]
  if ((descriptor & 0x1f) !== 0) refuse('bad-frame', 'a dictionary, a checksum or a reserved bit')
  const oneSegment = (descriptor & 0x20) !== 0
  let at = 5
  if (!oneSegment) {
    if (descriptor >> 6 === 0) refuse('bad-frame', 'no size of the content')
    const base = 2 ** (10 + (frame[at] >> 3))
    if (base + (base / 8) * (frame[at] & 7) > MOST_WINDOW) refuse('bad-frame', 'a window that is too large')
    at += 1
  }
  const width = [1, 2, 4, 8][descriptor >> 6]
  if (frame.length < at + width) refuse('bad-frame', 'a header that ends early')
  let size = 0n
  for (let i = width - 1; i >= 0; i--) size = (size << 8n) | BigInt(frame[at + i])
  if (width === 2) size += 256n
  if (size === 0n) refuse('bad-frame', 'a frame that holds nothing')
  return { size, end: at + width }
}

/** Refuse blocks that don't end with the frame. */
function checkBlocks(frame, start) {
  let at = start
  for (let last = false; !last; ) {
    if (frame.length < at + 3) refuse('bad-frame', 'blocks that end early')
    const word = frame[at] | (frame[at + 1] << 8) | (frame[at + 2] << 16)
    const [type, length] = [(word >> 1) & 3, word >> 3]
    if (type === 3 || length > MOST_BLOCK) refuse('bad-frame', 'a block of no known form')
    last = (word & 1) === 1
    at += 3 + (type === 1 ? 1 : length)
  }
  if (at !== frame.length) refuse('bad-frame', 'a frame that does not end with its last block')
}
