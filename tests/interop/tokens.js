// Section "tokens": token ids packed bit by bit, and log-probabilities in three bytes each.
// Both have one form only, so what is read and packed again is the same bytes.

import { refuse } from './errors.js'

const STEPS = 2 ** 18
const MOST = 2 ** 24 - 1

/** The bits that an id of this vocabulary takes. */
export function bitsOf(vocabulary) {
  return Math.max(1, (vocabulary - 1).toString(2).length)
}

/** The bytes that `count` ids take. */
export const packedLength = (count, bits) => Math.ceil((count * bits) / 8)

export function packIds(ids, bits) {
  const out = new Uint8Array(packedLength(ids.length, bits))
  ids.forEach((id, i) => {
    if (!Number.isInteger(id) || id < 0 || id >= 2 ** bits) refuse('out-of-range', `the id ${id} at ${bits} bits`)
    for (let b = 0; b < bits; b++) {
      const place = bits * i + b
      out[Math.floor(place / 8)] |= ((id >> b) & 1) << (place % 8)
    }
  })
  return out
}

export function unpackIds(bytes, count, bits) {
  checkPacked(bytes, count, bits)
  return Array.from({ length: count }, (_, i) => {
    let id = 0
    for (let b = 0; b < bits; b++) {
      const place = bits * i + b
      id |= ((bytes[Math.floor(place / 8)] >> (place % 8)) & 1) << b
    }
    return id
  })
}

/** Refuse bytes that are not the one packed form of `count` ids. */
export function checkPacked(bytes, count, bits) {
  if (bytes.length !== packedLength(count, bits)) refuse('inconsistent', `${bytes.length} bytes for ${count} ids`)
  const used = (count * bits) % 8
  if (used > 0 && bytes.at(-1) >> used !== 0) refuse('inconsistent', 'unused bits that are not zero')
}

export function packLogprobs(values) {
  const out = new Uint8Array(3 * values.length)
  values.forEach((value, i) => {
    if (!(value <= 0)) refuse('out-of-range', `the log-probability ${value}`)
    const n = Math.min(MOST, roundHalfToEven(-value * STEPS))
    for (let b = 0; b < 3; b++) out[3 * i + b] = (n >> (8 * b)) & 0xff
  })
  return out
}

export function unpackLogprobs(bytes) {
  if (bytes.length % 3 !== 0) refuse('inconsistent', 'log-probabilities take three bytes each')
  return Array.from({ length: bytes.length / 3 }, (_, i) => {
    const n = bytes[3 * i] | (bytes[3 * i + 1] << 8) | (bytes[3 * i + 2] << 16)
    return n === 0 ? 0 : -n / STEPS // never minus zero
  })
}

function roundHalfToEven(number) {
  const floor = Math.floor(number)
  const rest = number - floor
  if (rest !== 0.5) return rest < 0.5 ? floor : floor + 1
  return floor % 2 === 0 ? floor : floor + 1
}
