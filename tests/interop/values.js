// Section "vectors": how wire values are written in the JSON of the vectors.
// They become values as canonical.js has them.

import { fromHex } from './bytes.js'
import { Float, integer } from './canonical.js'

/** The number in `{"f64": "…"}`. */
export function readFloat({ f64 }) {
  const bytes = fromHex(f64)
  return new DataView(bytes.buffer).getFloat64(0)
}

/** The wire value (see canonical.js) that a value in JSON stands for. */
export function readValue(json) {
  if (typeof json === 'number') return integer(json)
  if (json === null || typeof json !== 'object') return json
  if (Array.isArray(json)) return json.map(readValue)
  const [form, ...others] = Object.keys(json)
  if (others.length === 0) {
    if (form === 'hex') return fromHex(json.hex)
    if (form === 'f64') return new Float(readFloat(json))
    if (form === 'int') return integer(BigInt(json.int))
    if (form === 'map') return new Map(Object.entries(json.map).map(([key, value]) => [key, readValue(value)]))
  }
  throw new Error(`no value: ${JSON.stringify(json)}`)
}
