// Section "delta": what changed in a chunk of 16-bit patterns, as gaps, steps and full patterns.
// A change has one body, so what is read is written again and compared.

import { join } from './bytes.js'
import { refuse } from './errors.js'
import { unpack } from './zstd.js'

/** A chunk's bytes as patterns. */
export const patterns = (bytes) => Array.from({ length: bytes.length / 2 }, (_, i) => bytes[2 * i] | (bytes[2 * i + 1] << 8))

export const patternBytes = (list) => Uint8Array.from(list.flatMap((each) => [each & 0xff, each >> 8]))

const zigzag = (step) => {
  const signed = (step << 16) >> 16
  return signed >= 0 ? 2 * signed : -2 * signed - 1
}

const unzigzag = (byte) => (byte % 2 === 0 ? byte / 2 : -(byte + 1) / 2)

/** The positions and new patterns that a frame has for the chunk `base`, a list of patterns. */
export const readDelta = (frame, base) => readBody(unpack(frame, 4 + 4 * base.length), base)

export function readBody(body, base) {
  if (body.length < 4) refuse('truncated', 'a body without a number of gaps')
  const count = new DataView(body.buffer, body.byteOffset).getUint32(0, true)
  if (count === 0) refuse('not-canonical', 'a change of nothing')
  if (body.length < 4 + count) refuse('truncated', 'a body that ends within its gaps')
  const gaps = body.subarray(4, 4 + count)
  if (gaps.at(-1) === 255) refuse('truncated', 'a gap that ends with a skip')
  const positions = []
  let at = 0
  for (const gap of gaps) {
    at += gap
    if (gap === 255) continue
    if (at >= base.length) refuse('out-of-range', `a change of element ${at} of ${base.length}`)
    positions.push(at)
    at += 1
  }
  const steps = body.subarray(4 + count, 4 + count + positions.length)
  if (steps.length < positions.length) refuse('truncated', 'fewer steps than changes')
  const full = body.subarray(4 + count + positions.length)
  const escapes = steps.filter((step) => step === 255).length
  if (full.length < 2 * escapes) refuse('truncated', 'fewer full patterns than escapes')
  if (full.length > 2 * escapes) refuse('trailing-bytes', 'bytes behind the last column')
  const escaped = patterns(full).values()
  const values = positions.map((position, i) => {
    if (steps[i] === 0) refuse('not-canonical', 'a step of zero')
    if (steps[i] < 255) return (base[position] + unzigzag(steps[i])) & 0xffff
    const value = escaped.next().value
    if (zigzag(value - base[position]) < 255) refuse('not-canonical', 'a full pattern where a short step leads')
    return value
  })
  return { positions, values }
}

/** The one body of a change. */
export function writeBody({ positions, values }, base) {
  const gaps = []
  const steps = []
  const full = []
  positions.forEach((position, i) => {
    const gap = position - (i === 0 ? -1 : positions[i - 1]) - 1
    for (let skipped = 255; skipped <= gap; skipped += 255) gaps.push(255)
    gaps.push(gap % 255)
    const step = zigzag(values[i] - base[position])
    steps.push(Math.min(step, 255))
    if (step >= 255) full.push(values[i])
  })
  const count = new Uint8Array(4)
  new DataView(count.buffer).setUint32(0, gaps.length, true)
  return join(count, Uint8Array.from(gaps), Uint8Array.from(steps), patternBytes(full))
}
