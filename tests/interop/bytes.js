// Small helpers for byte strings: hexadecimal, joining, comparing, and integers of fixed width.
// They are the notation of SPEC.md: ‖, u32be, u64be, u64le.

export { bytesToHex as toHex, concatBytes as join, hexToBytes as fromHex } from '@noble/hashes/utils.js'

/** Text as UTF-8. Text with half a surrogate pair has no such form; it's for the caller to look. */
export const utf8 = (text) => new TextEncoder().encode(text)

/** Negative, zero or positive, as `a` sorts before, with or after `b`. */
export function compare(a, b) {
  return Buffer.compare(a, b)
}

export const equal = (a, b) => compare(a, b) === 0

/** Strictly ascending: integers by value, bytes and strings by their bytes. */
export function before(a, b) {
  if (a instanceof Uint8Array) return compare(a, b) < 0
  if (typeof a === 'string') return compare(utf8(a), utf8(b)) < 0
  return a < b
}

export function u32be(number) {
  const out = new Uint8Array(4)
  new DataView(out.buffer).setUint32(0, number)
  return out
}

export function u64be(number) {
  const out = new Uint8Array(8)
  new DataView(out.buffer).setBigUint64(0, BigInt(number))
  return out
}

/** The integer in the eight bytes from `at` on, the least significant first, as a BigInt. */
export function readU64le(bytes, at = 0) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength).getBigUint64(at, true)
}

/** `bytes` cut into pieces of `size`. */
export function pieces(bytes, size) {
  const out = []
  for (let at = 0; at < bytes.length; at += size) out.push(bytes.subarray(at, at + size))
  return out
}
