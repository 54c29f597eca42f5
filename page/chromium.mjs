// Prints the path of a Chromium for the tests in a browser: unpacks the one of npm where it is not there yet.
import chromium from "@sparticuz/chromium";

console.log(await chromium.executablePath());
