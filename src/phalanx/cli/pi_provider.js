// Tells pi of a server of phalanx: `phalanx launch pi` names this file and sets the variable (launchers.py).
export default function (pi) {
  pi.registerProvider("phalanx", JSON.parse(process.env.PHALANX_PI_PROVIDER));
}
