// Section "sampling", and the lot of the section "verdict": everything that chance decides follows from keys and counters.
// Probabilities are plain arrays of numbers, in the order of token ids.

import { join, readU64le, u32be, u64be, utf8 } from './bytes.js'
import { context, derive, keyedHash } from './digest.js'
import { binaryPeerId, sign, verifies } from './identity.js'

const MOST_Z = 1e12

export const beaconOf = (headId) => derive('beacon', headId)

export function slotKey(run, beacon, sampler, slot) {
  return derive('slot', run, beacon, binaryPeerId(sampler), u64be(slot))
}

export const promptKey = (key) => keyedHash(key, utf8('prompt'))

/** The numbers u[completion, start], u[completion, start + 1], … */
export function uniforms(key, completion, start, count) {
  const stream = keyedHash(key, join(utf8('u'), u32be(completion)), 8 * (start + count))
  return Array.from({ length: count }, (_, i) => unit(readU64le(stream, 8 * (start + i))))
}

/** 64 random bits as a number from 0 up to and without 1. */
const unit = (bits) => Number(bits >> 11n) * 2 ** -53

/** The softmax of the first `vocabulary` logits at a temperature. */
export function probabilities(logits, vocabulary, temperature) {
  const scaled = Array.from(logits.slice(0, vocabulary), (logit) => logit / temperature)
  const most = scaled.reduce((a, b) => Math.max(a, b), -Infinity)
  const weights = scaled.map((logit) => Math.exp(logit - most))
  const total = weights.reduce((a, b) => a + b, 0)
  return weights.map((weight) => weight / total)
}

/** C(i) for each id i: the sums of `p` up to and including it, in the order of ids. */
function cumulative(p) {
  let total = 0
  return p.map((each) => (total += each))
}

/** The token drawn by the number `u`. */
export function draw(p, u) {
  const c = cumulative(p)
  return c.findIndex((each) => u * c.at(-1) < each)
}

/** How far `u` lies from the interval of the claimed token: the distance `d`, and `z`, in units of what noise explains. */
export function distance(p, token, u) {
  const c = cumulative(p)
  const squares = cumulative(p.map((each) => each * each))
  const below = token - 1
  const lower = below < 0 ? 0 : c[below] / c.at(-1)
  const upper = c[token] / c.at(-1)
  const d = Math.max(lower - u, u - upper, 0)
  if (d === 0) return { d, z: 0 }
  const [edge, s2] = u < lower ? [lower, squares[below]] : [upper, squares[token]]
  const rest = squares.at(-1) - s2
  const variance = (1 - edge) ** 2 * s2 + edge ** 2 * rest + (edge * (1 - edge)) ** 2 / 4
  return { d, z: Math.min(MOST_Z, d / Math.sqrt(variance)) } // also where the variance is 0
}

const drawBytes = (run, group) => join(context('draw'), Uint8Array.of(0), run, group)

/** A verifier's draw for a group. */
export const makeDraw = (seed, run, group) => sign(seed, drawBytes(run, group))

export const drawHolds = (verifier, run, group, signature) => verifies(verifier, drawBytes(run, group), signature)

/** Whether a group is verified at a rate, by the draw of a verifier. */
export const isDrawn = (signature, rate) => unit(readU64le(derive('lot', signature))) < rate
