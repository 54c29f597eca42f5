// Colours of maps: dark to light in even steps of lightness, so that an order is seen in grey, too; the darkest is
// told from the ground of a dark page.

export type Rgb = [number, number, number];

const RAMP: Rgb[] = [
  [88, 46, 141], [122, 62, 148], [157, 79, 143],
  [190, 98, 131], [219, 122, 115], [239, 152, 103], [248, 188, 110], [252, 229, 154],
];
const COOL: Rgb = [38, 110, 190];
const WARM: Rgb = [205, 72, 48];

export const BAD: Rgb = [255, 0, 220];
export const ZERO: Rgb = [20, 148, 132]; // in no ramp

function between(from: Rgb, to: Rgb, share: number): Rgb {
  return [0, 1, 2].map((at) => Math.round(from[at]! + (to[at]! - from[at]!) * share)) as Rgb;
}

export function ramp(share: number): Rgb {
  const at = Math.min(1, Math.max(0, share)) * (RAMP.length - 1);
  const low = Math.min(RAMP.length - 2, Math.floor(at));
  return between(RAMP[low]!, RAMP[low + 1]!, at - low);
}

/** -1 is blue, 0 white, 1 red. */
export function signed(value: number): Rgb {
  const share = Math.min(1, Math.abs(value));
  return between([245, 245, 245], value < 0 ? COOL : WARM, share);
}

/** `ramp` in 256 steps, as numbers for an ImageData. */
export const RAMP_256 = Array.from({ length: 256 }, (_, at) => ramp(at / 255));
export const SIGNED_256 = Array.from({ length: 256 }, (_, at) => signed((at - 127.5) / 127.5));

export const LINES = ["#4f8ef7", "#e8743b", "#b65fcf", "#2fb7c4", "#8a7f72", "#ed4a7b", "#19a979", "#d4a72c"];

export function css(color: Rgb): string {
  return `rgb(${color.join(",")})`;
}

/** Black or white, whichever is read better on a colour (relative luminance of WCAG 2.2). */
export function inkOn(color: Rgb): string {
  const [red, green, blue] = color.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4)) as Rgb;
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

/** Give an element the colour of a place in the ramp, and letters that are read on it. */
export function shadeWith(element: HTMLElement, share: number): void {
  const color = ramp(share);
  element.style.backgroundColor = css(color);
  element.style.color = inkOn(color);
}
