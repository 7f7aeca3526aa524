// Section "identity": Ed25519 keys and the peer ids that libp2p derives from them.
// The library's own verification multiplies by the cofactor, also in its strict mode; SPEC.md asks for the equation without it,
// so the equation is written out here, over the library's curve.

import { ed25519 } from '@noble/curves/ed25519.js'
import { sha512 } from '@noble/hashes/sha2.js'
import { compare, equal, fromHex, join } from './bytes.js'
import { refuse } from './errors.js'

const { Point } = ed25519
const P = Point.Fp.ORDER
const L = Point.Fn.ORDER

/** The y of the points of small order. */
export const SMALL_ORDER = new Set([
  0n,
  1n,
  P - 1n,
  2707385501144840649318225287225658788936804267575313519463743609750303402022n,
  55188659117513257062467267217118295137698188065244968500265048394206261417927n,
])

const littleEndian = (bytes) => bytes.reduceRight((sum, byte) => (sum << 8n) | BigInt(byte), 0n)

/** The key itself, if it is a public key; else it is refused. */
export function checkKey(key) {
  if (key.length !== 32) refuse('bad-key', `${key.length} bytes`)
  const y = littleEndian(key) & ((1n << 255n) - 1n)
  if (y >= P) refuse('bad-key', 'y is not below 2^255 − 19')
  if (SMALL_ORDER.has(y)) refuse('bad-key', 'a point of small order')
  return key
}

export const publicKey = (seed) => ed25519.getPublicKey(seed)

export const sign = (seed, message) => ed25519.sign(message, seed)

/** Whether [S]B − [k]A is R, byte by byte, with S below the order. */
export function verifies(key, message, signature) {
  checkKey(key)
  if (signature.length !== 64) return false
  const r = signature.subarray(0, 32)
  const s = littleEndian(signature.subarray(32))
  if (s >= L) return false
  let a
  try {
    a = Point.fromBytes(key, false)
  } catch {
    return false // y belongs to no point of the curve
  }
  const k = littleEndian(sha512(join(r, key, message))) % L
  const expected = Point.BASE.multiplyUnsafe(s).subtract(a.multiplyUnsafe(k))
  return equal(expected.toBytes(), r)
}

// The identity multihash of libp2p's protobuf, before the 32 bytes of the key.
const PREFIX = fromHex('002408011220')
const ALPHABET = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz'

export const binaryPeerId = (key) => join(PREFIX, checkKey(key))

export const peerId = (key) => toBase58(binaryPeerId(key))

/** The public key in the text of a peer id. */
export function keyOfPeerId(text) {
  const bytes = text.length === 52 ? fromBase58(text) : null
  if (bytes === null || bytes.length !== 38 || compare(bytes.subarray(0, 6), PREFIX) !== 0) {
    refuse('bad-peer-id', 'not the peer id of an Ed25519 key')
  }
  try {
    return checkKey(bytes.slice(6))
  } catch {
    return refuse('bad-peer-id', 'the key in it is none')
  }
}

function toBase58(bytes) {
  let number = bytes.reduce((sum, byte) => (sum << 8n) | BigInt(byte), 0n)
  let out = ''
  for (; number > 0n; number /= 58n) out = ALPHABET[Number(number % 58n)] + out
  const zeros = bytes.findIndex((byte) => byte !== 0)
  return ALPHABET[0].repeat(zeros < 0 ? bytes.length : zeros) + out
}

/** The bytes of base58btc text, or null if a character is not of its alphabet. */
function fromBase58(text) {
  let number = 0n
  for (const character of text) {
    const digit = ALPHABET.indexOf(character)
    if (digit < 0) return null
    number = number * 58n + BigInt(digit)
  }
  const digits = number === 0n ? '' : number.toString(16)
  const body = fromHex(digits.length % 2 === 0 ? digits : `0${digits}`)
  const zeros = text.length - text.replace(/^1+/, '').length
  return join(new Uint8Array(zeros), body)
}
