// Section "errors": every refusal has a reason, a fixed word that implementations share.
// A refusal of the section "chain" also names the rule that was broken.

export class Refused extends Error {
  constructor(reason, detail, rule = null) {
    super(`${reason}: ${detail}`)
    this.reason = reason
    this.rule = rule
  }
}

export function refuse(reason, detail) {
  throw new Refused(reason, detail)
}

export function refuseByRule(rule, detail) {
  throw new Refused('chain', `${rule}: ${detail}`, rule)
}
